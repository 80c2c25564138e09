"""The recorded training episodes, and the entities in their documents."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dreamgym_lg.actions import is_answer
from dreamgym_lg.compiled.expressions import canonical
from dreamgym_lg.compiled.identifiers import Identifiers, Type, walk_ids
from dreamgym_lg.compiled.recordings import Recordings, Trace
from dreamgym_lg.compiled.runtime import values_in
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.splits import common_entities, words
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Trajectory

MIN_LOOKED_UP = 0.25
"""Share of the successes with the same writing tools. If so many looked up first, the others are guesses."""
MIN_ALIKE = 3
"""Least number of entities with the same field in two documents that show it is always equal."""
REQUEST = ("", "{}")
"""Key of the task's request, which counts as a document of its episode."""

Place = tuple[str, str]
"""A reading tool and its arguments, as JSON."""


class Record(NamedTuple):
    """A recorded episode, with its first documents parsed."""

    trajectory: Trajectory
    trace: Trace
    documents: Mapping[Place, Any]
    """Its first documents, and its request."""
    spots: Mapping[tuple[Place, tuple[Any, ...]], str]
    """(document, path in it) -> id, for all ids in the documents."""
    writes: tuple[Any, ...]
    """Sorted writing calls with those arguments alone that are common among the tool's calls."""
    words: frozenset[str]
    """Words of the request, without ids."""


class Records:
    """The recorded training episodes, and the entities in their documents."""

    def __init__(self, index: TraceIndex, chosen: Sequence[Trajectory], environment: str | None) -> None:
        writes = frozenset(filter(index.writes, index.uses))
        recordings = Recordings.of(index.replay_buffer, tools=index.tools, writes=writes, environment=environment)
        self.recordings = recordings.without_refusals()
        texts = (text for each in chosen for step in each.steps for text in (step.action, step.next_observation))
        requests = (first_observation(task) for task in index.replay_buffer.tasks())
        self.identifiers = Identifiers(self.recordings, "\n".join([*requests, *texts]))
        writing = [(tool, arguments) for tool, arguments, _ in self.recordings.calls if tool in writes]
        self._common_arguments = common_entities([[(tool, *pair) for pair in _arguments(values)] for tool, values in writing])
        train = [each for each in chosen if each.task.split == "train"]
        self.all = [self.record(*pair) for pair in zip(train, self.recordings.traces, strict=True)]
        self.looked_up = frozenset(place for each in self.all for place in each.documents)
        self._shared = self._shared_fields()
        successes = [each for each in self.all if each.trajectory.success and _is_single_turn(each.trajectory)]
        informed = Counter(writing_tools(each) for each in successes if self._read_all(each))
        total = Counter(map(writing_tools, successes))
        # a guess is right only in some states: tasks drawn from a successful one would all be in these, and reward guessing
        unread = {tools for tools, number in total.items() if informed[tools] < MIN_LOOKED_UP * number}
        self.successes = [each for each in successes if self._read_all(each) or writing_tools(each) in unread]
        self.guesses = len(successes) - len(self.successes)

    def record(self, trajectory: Trajectory, trace: Trace) -> Record:
        request = first_observation(trajectory.task)
        first = self.recordings.first_documents(trace, is_name=self.identifiers.types_of)
        documents = {REQUEST: request, **{place: json.loads(text) for place, text in first.items()}}
        writes = tuple(
            (tool, *(each for each in _arguments(arguments) if (tool, *each) in self._common_arguments))
            for tool, arguments, _ in trace.calls
            if tool in self.recordings.writes
        )
        id_words = {word for value in self.identifiers.find(request) for word in words(value)}
        other_words = frozenset(words(request)) - id_words
        return Record(trajectory, trace, documents, self.spots(documents), tuple(sorted(writes)), other_words)

    def _read_all(self, record: Record) -> bool:
        """True if each entity in a writing call was looked up earlier."""
        known = set[str]()
        for tool, arguments, _ in record.trace.calls:
            ids = {each for value in values_in(arguments) for each in self.identifiers.find(str(value))}
            if tool not in self.recordings.writes:
                known |= ids
            elif not ids <= known:
                return False
        return True

    def spots(self, documents: Mapping[Place, Any]) -> dict[tuple[Place, tuple[Any, ...]], str]:
        return {(place, spot): value for place, node in documents.items() for spot, value in walk_ids(self.identifiers, node)}

    def _shared_fields(self) -> Mapping[tuple[Any, ...], bool]:
        """(kind of place, tool, field) -> True as of `is_shared`."""
        equal = defaultdict[tuple[Any, ...], list[bool]](list)
        for record in self.all:
            for (place, spot), value in record.spots.items():
                node = object_at(record.documents[place], spot)
                for type in self.identifiers.types_of(value):
                    other = self.identifiers.place(type, value)
                    document = record.documents.get(other)
                    if other != place and isinstance(document, Mapping):
                        for field in node.keys() & document.keys():
                            equal[_path_names(place, spot), type[0], field].append(node[field] == document[field])
        return {key: len(tests) >= MIN_ALIKE and all(tests) for key, tests in equal.items()}

    def known_fields(self, documents: Mapping[Place, Any], value: str, type: Type) -> dict[str, Any]:
        """Fields of an entity that documents which contain its id show already."""
        known = dict[str, Any]()
        for (place, spot), id in self.spots(documents).items():
            node = object_at(documents[place], spot) if id == value else {}
            known |= {name: node[name] for name in node if self.is_shared(place, spot, type, name)}
        return known

    def is_shared(self, place: Place, spot: Sequence[Any], type: Type, field: str) -> bool:
        """True if a field beside an entity's id always equals that of its own document."""
        return self._shared.get((_path_names(place, spot), type[0], field), False)

    def text(self, tool: str, document: Any) -> str:
        """A parsed answer as its tool writes it."""
        return document if isinstance(document, str) else json.dumps(document, **self.recordings.styles[tool])


def object_at(document: Any, spot: Sequence[Any]) -> Mapping[str, Any]:
    """The innermost object around a path of `walk_ids`; {} for a text outside of objects."""
    for key in spot[:-2]:
        document = document[key]
    return document if isinstance(document, Mapping) else {}


def _path_names(place: Place, spot: Sequence[Any]) -> tuple[str, ...]:
    """The tool and keys of a path, without list indices."""
    return place[0], *(each for each in spot if isinstance(each, str))


def _arguments(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, canonical(value)) for name, value in sorted(arguments.items())]


def _is_single_turn(trajectory: Trajectory) -> bool:
    """True for an episode that ends with the agent's first message."""
    return [is_answer(step.action) for step in trajectory.steps].count(True) == 1 and is_answer(trajectory.steps[-1].action)


def writing_tools(record: Record) -> tuple[str, ...]:
    """Tools of the writing calls, in the order of `Record.writes`."""
    return tuple(tool for tool, *_ in record.writes)
