"""The training episodes of a buffer, and what is known of their entities."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dreamgym_lg.actions import is_answer
from dreamgym_lg.compiled.identifiers import Identifiers, Type, ids_in
from dreamgym_lg.compiled.recordings import Recordings, Trace
from dreamgym_lg.compiled.runtime import values_in
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.splits import common_entities, words
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Trajectory

MIN_LOOKED_UP = 0.25
"""Share of the successes with the same writing tools that looked first, from which on the others count as guesses."""
MIN_ALIKE = 3
"""Entities in two documents of which a field is always the same, if it is to be so in drawn ones."""
REQUEST = ("", "{}")
"""The place of the request among the documents of an episode."""

Place = tuple[str, str]
"""A reading tool and its arguments, as JSON."""


class Record(NamedTuple):
    """A recorded episode, with its first documents parsed."""

    trajectory: Trajectory
    trace: Trace
    documents: Mapping[Place, Any]
    """The request is one of them."""
    spots: Mapping[tuple[Place, tuple[Any, ...]], str]
    """The ids in documents, by document and place in it."""
    writes: tuple[Any, ...]
    """Writing calls without what few calls of their tools have in common."""
    words: frozenset[str]
    """Of the request, without ids."""


class Records:
    """The training episodes of a buffer, and what is known of their entities."""

    def __init__(self, index: TraceIndex, chosen: Sequence[Trajectory], environment: str | None) -> None:
        writes = frozenset(filter(index.writes, index.uses))
        self.recordings = Recordings.of(index.replay_buffer, tools=index.tools, writes=writes, environment=environment)
        texts = (text for each in chosen for step in each.steps for text in (step.action, step.next_observation))
        requests = (first_observation(task) for task in index.replay_buffer.tasks())
        self.identifiers = Identifiers(self.recordings, "\n".join([*requests, *texts]))
        calls = [call for trace in self.recordings.traces for call in trace.calls if call[0] in writes]
        self._usual = common_entities([[(tool, *each) for each in _arguments(own)] for tool, own, _ in calls])
        train = [each for each in chosen if each.task.split == "train"]
        self.all = [self.record(*pair) for pair in zip(train, self.recordings.traces, strict=True)]
        self.looked_up = frozenset(place for each in self.all for place in each.documents)
        self._shared = self._shared_fields()
        successes = [each for each in self.all if each.trajectory.success and _is_single(each.trajectory)]
        looked = Counter(writing_tools(each) for each in successes if self._knew_all(each))
        whole = Counter(map(writing_tools, successes))
        # who guesses is right in some states alone: drawn from such successes, tasks would be in these, and reward the guess
        unread = {tools for tools, number in whole.items() if looked[tools] < MIN_LOOKED_UP * number}
        self.successes = [each for each in successes if self._knew_all(each) or writing_tools(each) in unread]
        self.guesses = len(successes) - len(self.successes)

    def record(self, trajectory: Trajectory, trace: Trace) -> Record:
        request = first_observation(trajectory.task)
        first = self.recordings.first_documents(trace, is_name=self.identifiers.types_of)
        documents = {REQUEST: request, **{place: json.loads(text) for place, text in first.items()}}
        writes = tuple(
            (tool, *(each for each in _arguments(own) if (tool, *each) in self._usual))
            for tool, own, _ in trace.calls
            if tool in self.recordings.writes
        )
        named = {word for value in self.identifiers.find(request) for word in words(value)}
        own = frozenset(words(request)) - named
        return Record(trajectory, trace, documents, self.spots(documents), tuple(sorted(writes)), own)

    def _knew_all(self, record: Record) -> bool:
        """True where reading calls had named all entities of the writing calls before."""
        known = set[str]()
        for tool, arguments, _ in record.trace.calls:
            ids = {each for value in values_in(arguments) for each in self.identifiers.find(str(value))}
            if tool not in self.recordings.writes:
                known |= ids
            elif not ids <= known:
                return False
        return True

    def spots(self, documents: Mapping[Place, Any]) -> dict[tuple[Place, tuple[Any, ...]], str]:
        return {(place, spot): value for place, each in documents.items() for spot, value in ids_in(self.identifiers, each)}

    def _shared_fields(self) -> Mapping[tuple[Any, ...], bool]:
        """Fields that are alike where an entity is named and looked up: place, tool, name."""
        equal = defaultdict[tuple[Any, ...], list[bool]](list)
        for record in self.all:
            for (place, spot), value in record.spots.items():
                node = object_at(record.documents[place], spot)
                for type in self.identifiers.types_of(value):
                    other = self.identifiers.place(type, value)
                    document = record.documents.get(other)
                    if other != place and isinstance(document, Mapping):
                        for field in node.keys() & document.keys():
                            equal[_kind(place, spot), type[0], field].append(node[field] == document[field])
        return {key: len(each) >= MIN_ALIKE and all(each) for key, each in equal.items()}

    def known_fields(self, documents: Mapping[Place, Any], value: str, type: Type) -> dict[str, Any]:
        """Fields of an entity that other documents, which name it, tell already."""
        known = dict[str, Any]()
        for (place, spot), id in self.spots(documents).items():
            node = object_at(documents[place], spot) if id == value else {}
            known |= {name: node[name] for name in node if self.is_shared(place, spot, type, name)}
        return known

    def is_shared(self, place: Place, spot: Sequence[Any], type: Type, field: str) -> bool:
        """True if a field beside an entity's name always equals the entity's own."""
        return self._shared.get((_kind(place, spot), type[0], field), False)

    def text(self, tool: str, document: Any) -> str:
        """A parsed answer as its tool writes it."""
        return document if isinstance(document, str) else json.dumps(document, **self.recordings.styles[tool])


def object_at(document: Any, spot: Sequence[Any]) -> Mapping[str, Any]:
    """The object of a document that holds the text at this place; empty for none."""
    for key in spot[:-2]:
        document = document[key]
    return document if isinstance(document, Mapping) else {}


def _kind(place: Place, spot: Sequence[Any]) -> tuple[str, ...]:
    """The tool and the keys of a place. Elements of a list are alike."""
    return place[0], *(each for each in spot if isinstance(each, str))


def _arguments(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, json.dumps(value, sort_keys=True)) for name, value in sorted(arguments.items())]


def _is_single(trajectory: Trajectory) -> bool:
    """True for an episode that ends with the agent's first message."""
    return [is_answer(step.action) for step in trajectory.steps].count(True) == 1 and is_answer(trajectory.steps[-1].action)


def writing_tools(record: Record) -> tuple[str, ...]:
    """Names of the tools of its writing calls, in the order of `Record.writes`."""
    return tuple(tool for tool, *_ in record.writes)
