"""Draws new tasks from recorded successes. Each has entities of its own, and a reference that was run on them."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import Any, NamedTuple

from dreamgym_lg.actions import parse_call, render_answer, render_call
from dreamgym_lg.compiled.entities import REQUEST, Place, Record, Records, object_at, writing_tools
from dreamgym_lg.compiled.identifiers import Renaming, Type, ids_in
from dreamgym_lg.compiled.responder import Compiled
from dreamgym_lg.compiled.runtime import key_of, parsed, values_in
from dreamgym_lg.dream.trace_index import TraceIndex, message_text
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.splits import words
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Drawn, Task

MAX_DOCUMENTS = 40
"""Look-ups of a drawn task's entities."""
NEAREST = 10
"""Recorded entities, those of the most similar requests, among which the state of an unknown one is drawn."""


class Drawing(NamedTuple):
    """Drawn tasks, and why others were dropped."""

    tasks: list[Task]
    dropped: Counter[str]
    """By reason."""


def draw_tasks(
    world: Compiled, traces: ReplayBuffer | TraceIndex, count: int, *, seed: int = 0, environment: str | None = None
) -> Drawing:
    """New training tasks like recorded successes, about entities that no trace holds.

    A success's ids are replaced everywhere: in its request, calls, answers and last message. What it did not look up is drawn
    from the records of successes that made the same writing calls, in the nearest words. The reference is then run in the
    compiled world: a task of which a call is not answered, or not as recorded, is dropped.

    Args:
        traces: A replay buffer, or an index of one that knows which tools write.
        count: Tasks that are tried. Recorded successes take turns. One that changed what it had not looked up was perhaps a
            guess, right in some states alone: it takes no turn where a quarter of those that call the same tools looked first.
        environment: Whose traces; by default all of the buffer's.

    Raises `ConfigurationError` where no episode of one user message succeeded.
    """
    index = TraceIndex.of(traces)
    index.refresh()
    chosen = [each for each in index.replay_buffer.real_trajectories() if environment in (None, each.task.environment)]
    records = Records(index, chosen, environment)
    if not records.successes:
        raise ConfigurationError(
            f"none of the {len(chosen)} recorded episodes succeeded without a user's reply: nothing to draw"
        )
    rng, drawing = Random(seed), Drawing([], Counter())
    if records.guesses:
        drawing.dropped["successes that guessed where others looked first"] = records.guesses
    order = rng.sample(records.successes, len(records.successes))
    for number in range(count):
        drawn = draw(records, order[number % len(order)], rng)
        if isinstance(drawn, Task):
            drawn = verified(world, records, drawn)
        if isinstance(drawn, Task):
            drawing.tasks.append(drawn)
        else:
            drawing.dropped[drawn] += 1
    return drawing


def draw(records: Records, base: Record, rng: Random) -> Task | str:
    """The success with new ids and documents of its entities, or why there is none."""
    task, styles, renaming = base.trajectory.task, records.recordings.styles, Renaming()
    identifiers = records.identifiers
    calls = [[tool, dict(arguments), parsed(answer, styles[tool])] for tool, arguments, answer in base.trace.calls]
    message = message_text(base.trajectory.steps[-1].action)
    nodes = [value for part in (*base.documents.values(), calls, message) for value in values_in(part)]
    ids = dict.fromkeys(
        value for node in nodes if not isinstance(node, (bool, type(None))) for value in identifiers.find(str(node))
    )
    for value in sorted(ids, key=lambda each: (-len(each), each)):
        if value not in renaming:
            if (new := identifiers.fresh(value, renaming, rng)) is None:
                return "no new id of its form"
            renaming |= new
    if not any(value in renaming for value in identifiers.find(first_observation(task))):
        return "the request names no entity"
    if renaming.left_in(" ".join([renaming(task.instruction), renaming(message)])):
        return "an entity is named in other ways"
    documents = {(tool, key_of(renaming(json.loads(key)))): renaming(text) for (tool, key), text in base.documents.items()}
    complete(records, base, documents, renaming, rng)
    del documents[REQUEST]
    steps = [[render_call(tool, renaming(own)), records.text(tool, renaming(answer))] for tool, own, answer in calls]
    drawn = Drawn(
        documents=[[tool, json.loads(key), records.text(tool, document)] for (tool, key), document in documents.items()],
        steps=[*steps, [render_answer(renaming(message)), ""]],
        told=[],
        untold=[],
    )
    if not any(call[0] in records.recordings.writes for call in calls):
        drawn["told"], drawn["untold"] = _facts(records, documents, renaming(task.instruction), renaming(message))
        if not drawn["told"]:
            return "nothing is changed, and nothing told that is known"
    return _task(task, renaming, drawn)


def _task(task: Task, renaming: Renaming, drawn: Drawn) -> Task:
    digest = sha256(json.dumps(drawn, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    texts = {name: renaming(getattr(task, name)) for name in ("instruction", "observation", "rubric")}
    rest = {"messages": renaming([*map(dict, task.messages)]), "metadata": renaming(dict(task.metadata)), "drawn": dict(drawn)}
    origin: dict[str, Any] = {"origin": "synthetic", "parent_id": task.id, "goal": {}}
    return replace(task, id=f"{task.environment}/drawn-{digest}", **texts, **rest, **origin)


class _Origin(NamedTuple):
    """Where an entity of a drawn task comes from."""

    record: Record
    value: str
    """Its id there."""
    renaming: Renaming


def complete(
    records: Records, base: Record, documents: dict[Place, Any], renaming: Renaming, rng: Random, *, alike: bool = True
) -> None:
    """Add documents of each entity that others name, until all are there.

    Args: `documents`, of `base` with the ids that `renaming` gives; `alike`, what no trace has is as in the episode most like
    `base`, else as in one with a similar request.
    """
    ids = records.identifiers
    origins = {new: _Origin(base, old, renaming) for old, new in renaming.items()}
    pending = list(dict.fromkeys(records.spots(documents).values()))
    while pending and len(documents) < MAX_DOCUMENTS:
        value = pending.pop(0)
        # one that many episodes name keeps its id, and its recorded documents
        for type in sorted(ids.types_of(origins[value].value)) if value in origins else ():
            place = ids.place(type, value)
            donor = _same_entity(records, origins[value], type)
            known = {} if donor else records.known_fields(documents, value, type)
            donor = donor or _donor(records, base, documents, value, type, rng, alike, known)
            if place in documents or donor is None:
                continue
            document = donor.record.documents[ids.place(type, donor.value)]
            for old in dict.fromkeys(each for _, each in ids_in(ids, document)):
                if old not in donor.renaming and (new := ids.fresh(old, donor.renaming, rng)) is not None:
                    donor.renaming.update(new)
                    origins |= {id: _Origin(donor.record, one, donor.renaming) for one, id in new.items()}
            renamed = donor.renaming(document)
            documents[place] = {**renamed, **known} if isinstance(renamed, dict) else renamed
            if place not in records.looked_up:
                _make_agree(records, documents, place, origins)
            pending += [each for _, each in ids_in(ids, documents[place])]


def _make_agree(records: Records, documents: Mapping[Place, Any], place: Place, origins: Mapping[str, _Origin]) -> None:
    """Take over the fields of known entities into a new document that names them."""
    ids = records.identifiers
    for spot, value in list(ids_in(ids, documents[place])):
        for type in ids.types_of(origins[value].value) if value in origins else ():
            node, other = object_at(documents[place], spot), documents.get(ids.place(type, value))
            if isinstance(other, dict) and isinstance(node, dict) and ids.place(type, value) != place:
                shared = (name for name in node.keys() & other.keys() if records.is_shared(place, spot, type, name))
                node.update({name: other[name] for name in shared})


def _same_entity(records: Records, origin: _Origin, type: Type) -> _Origin | None:
    """The entity itself, in the first episode that looked it up."""
    place = records.identifiers.place(type, origin.value)
    record = next((each for each in (origin.record, *records.all) if place in each.documents), None)
    return origin._replace(record=record) if record is not None else None


def _donor(
    records: Records,
    base: Record,
    documents: Mapping[Place, Any],
    value: str,
    type: Type,
    rng: Random,
    alike: bool,
    known: Mapping[str, Any],
) -> _Origin | None:
    """An entity of another episode at the same place, with the ids around it.

    Of those with most of the `known` fields, with `alike` the nearest one: of successes that made the same writing calls, then
    of those with the same tools, each by the words of the request. Else one of the `NEAREST` by these words alone, so that
    nothing ties the state to what was done.
    """
    ours = records.spots(documents)
    stands = {(where[0], spot): where for (where, spot), each in ours.items() if each == value}
    donors = list[tuple[Any, ...]]()
    for record in records.all:
        same = record.writes == base.writes, writing_tools(record) == writing_tools(base)
        near = (*(alike and record.trajectory.success and each for each in same), _similarity(record.words, base.words))
        for (where, spot), old in record.spots.items():
            if (where[0], spot) in stands and records.identifiers.place(type, old) in record.documents and record is not base:
                document = record.documents[records.identifiers.place(type, old)]
                fitting = sum(isinstance(document, dict) and document.get(name) == each for name, each in known.items())
                donors.append(((fitting, near), rng.random(), record, old, where, stands[where[0], spot]))
    if not donors:
        return None
    donors.sort(key=lambda each: each[:2], reverse=True)
    donors = [each for each in donors if each[0][0] == donors[0][0][0]]
    _, _, record, old, theirs, here = donors[0] if alike else rng.choice(donors[:NEAREST])
    renaming = Renaming({old: value})
    for (where, spot), each in record.spots.items():
        if where == theirs and (here, spot) in ours:
            renaming.setdefault(each, ours[here, spot])
    for one, other in zip(json.loads(theirs[1]).values(), json.loads(here[1]).values(), strict=False):
        renaming.setdefault(str(one), str(other))
    return _Origin(record, old, renaming)


def _similarity(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / (len(one | other) or 1)


def _facts(records: Records, documents: Mapping[Place, Any], request: str, message: str) -> tuple[list[str], list[str]]:
    """Facts of the documents in the message, and other recorded values of these fields."""
    said, asked = f" {' '.join(words(message))} ", f" {' '.join(words(request))} "
    told = {word for word in words(message) if any(map(str.isdigit, word)) and f" {word} " not in asked}
    untold = set[str]()
    for field, text in _fields(documents):
        if f" {text} " in said and f" {text} " not in asked:
            told.add(text)
            others = {other for each in records.all for place, other in _fields(each.documents) if place == field}
            untold |= {other for other in others if not any(map(str.isdigit, other)) and f" {other} " not in said + asked}
    return sorted(told), sorted(untold)


def _fields(documents: Mapping[Place, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The texts of documents in the form of `words`, each with its tool and keys."""
    for (tool, _), document in documents.items():
        yield from _texts((tool,), document) if isinstance(document, (dict, list)) else ()


def _texts(field: tuple[str, ...], node: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else (("", each) for each in node):
            yield from _texts((*field, key), value)
    elif isinstance(node, (str, int, float)) and not isinstance(node, bool) and (text := " ".join(words(str(node)))):
        yield field, text


def verified(world: Compiled, records: Records, task: Task) -> Task | str:
    """The task with its reference as the world answers, or why it does not hold.

    The answer to a writing call may differ in what the reference neither looked up before nor told.
    """
    known, steps, writes = [list(each) for each in task.drawn["documents"]], list[list[str]](), records.recordings.writes
    told = set(words(message_text(task.drawn["steps"][-1][0])))
    for action, expected in task.drawn["steps"]:
        if (call := parse_call(action)) is not None:
            answer = world.answer(task.id, known, call.name, call.arguments)
            if answer is None:
                return f"{call.name} is not answered"
            lost = set(words(expected)) - set(words(answer))
            one, other = (_form(parsed(text, records.recordings.styles[call.name])) for text in (answer, expected))
            if answer != expected and (call.name not in writes or one != other or lost & told):
                return f"{call.name} answers otherwise"
            known.append([call.name, dict(call.arguments), answer])
            expected = answer
        steps.append([action, expected])
    return replace(task, drawn={**task.drawn, "steps": steps})


def _form(node: Any) -> Any:
    """The keys and types of a document; a text alone without its numbers."""
    if isinstance(node, dict):
        return {key: type(value).__name__ if isinstance(value, str) else _form(value) for key, value in node.items()}
    if isinstance(node, list):
        return list(map(_form, node))
    return re.sub(r"\d+", "0", node) if isinstance(node, str) else type(node).__name__
