"""Draws new tasks from recorded successes, with new entities and a tested reference solution."""

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
from dreamgym_lg.compiled.identifiers import Renaming, Type, walk_ids
from dreamgym_lg.compiled.responder import Compiled
from dreamgym_lg.compiled.runtime import Refusal, key_of, parsed, values_in, walk
from dreamgym_lg.dream.facts import message_text
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.splits import words
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Drawn, Task

MAX_DOCUMENTS = 40
"""Most documents of a drawn task."""
NEAREST = 10
"""Recorded entities with the most similar requests: an unknown one gets the state of one of them."""


class Drawing(NamedTuple):
    """Drawn tasks, and the number of dropped ones."""

    tasks: list[Task]
    dropped: Counter[str]
    """By reason, in words."""


def draw_tasks(
    world: Compiled, traces: ReplayBuffer | TraceIndex, count: int, *, seed: int = 0, environment: str | None = None
) -> Drawing:
    """New training tasks like recorded successes, about entities that no trace holds.

    A success's ids are replaced in its request, calls, answers and last message. The documents of entities that it did not
    look up come from similar successes (`_donor`). The renamed calls, the reference, are then run in the compiled world: if
    one is not answered, or not as recorded, the task is dropped.

    Args:
        traces: A replay buffer, or an index of one that knows which tools write.
        count: Number of attempts. Recorded successes take turns. One that changed an entity without looking it up may have
            guessed: it is skipped if a quarter (`MIN_LOOKED_UP`) of the successes with the same writing tools looked first.
        environment: Name of the environment whose traces are used. Default: all of the buffer's.

    Raises `ConfigurationError` if no episode with a single user message succeeded.
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
    """A new task from a success, by replacing its ids; or the reason of failure."""
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
    steps = [[render_call(tool, renaming(args)), records.text(tool, renaming(answer))] for tool, args, answer in calls]
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
    """The recorded entity that one of a drawn task was copied from."""

    record: Record
    value: str
    """Its recorded id."""
    renaming: Renaming


def complete(
    records: Records, base: Record, documents: dict[Place, Any], renaming: Renaming, rng: Random, *, alike: bool = True
) -> None:
    """Add the document of each entity that another document contains, until none is missing.

    Args: `documents`, those of `base` after `renaming`, which are added to; `alike`, as of `_donor`.
    """
    ids = records.identifiers
    origins = {new: _Origin(base, old, renaming) for old, new in renaming.items()}
    pending = list(dict.fromkeys(records.spots(documents).values()))
    while pending and len(documents) < MAX_DOCUMENTS:
        value = pending.pop(0)
        # an entity of many episodes was not renamed: it keeps its recorded documents
        for type in sorted(ids.types_of(origins[value].value)) if value in origins else ():
            place = ids.place(type, value)
            donor = _same_entity(records, origins[value], type)
            known = {} if donor else records.known_fields(documents, value, type)
            donor = donor or _donor(records, base, documents, value, type, rng, alike, known)
            if place in documents or donor is None:
                continue
            document = donor.record.documents[ids.place(type, donor.value)]
            for old in dict.fromkeys(id for _, id in walk_ids(ids, document)):
                if old not in donor.renaming and (new := ids.fresh(old, donor.renaming, rng)) is not None:
                    donor.renaming.update(new)
                    origins |= {id: _Origin(donor.record, recorded, donor.renaming) for recorded, id in new.items()}
            renamed = donor.renaming(document)
            documents[place] = {**renamed, **known} if isinstance(renamed, dict) else renamed
            if place not in records.looked_up:
                _copy_shared_fields(records, documents, place, origins)
            pending += [id for _, id in walk_ids(ids, documents[place])]


def _copy_shared_fields(records: Records, documents: Mapping[Place, Any], place: Place, origins: Mapping[str, _Origin]) -> None:
    """Copy into a new document the fields that other documents determine (`is_shared`)."""
    ids = records.identifiers
    for spot, value in list(walk_ids(ids, documents[place])):
        for type in ids.types_of(origins[value].value) if value in origins else ():
            node, other = object_at(documents[place], spot), documents.get(ids.place(type, value))
            if isinstance(other, dict) and isinstance(node, dict) and ids.place(type, value) != place:
                shared = (name for name in node.keys() & other.keys() if records.is_shared(place, spot, type, name))
                node.update({name: other[name] for name in shared})


def _same_entity(records: Records, origin: _Origin, type: Type) -> _Origin | None:
    """The same entity in the first episode that looked it up; None if none did."""
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
    """An entity of another episode, at the same place, whose document replaces the missing one.

    Only candidates with the most `known` fields count. With `alike` the one from a success with the same writing calls, else
    tools, and the nearest request; otherwise a random one of the `NEAREST` requests: the state must not depend on the calls.
    """
    spots = records.spots(documents)
    targets = {(where[0], spot): where for (where, spot), id in spots.items() if id == value}
    donors = list[tuple[Any, ...]]()
    for record in records.all:
        same = record.writes == base.writes, writing_tools(record) == writing_tools(base)
        nearness = (*(alike and record.trajectory.success and each for each in same), _similarity(record.words, base.words))
        for (where, spot), old in record.spots.items():
            if (where[0], spot) in targets and records.identifiers.place(type, old) in record.documents and record is not base:
                document = record.documents[records.identifiers.place(type, old)]
                fitting = sum(isinstance(document, dict) and document.get(name) == each for name, each in known.items())
                donors.append(((fitting, nearness), rng.random(), record, old, where, targets[where[0], spot]))
    if not donors:
        return None
    donors.sort(key=lambda each: each[:2], reverse=True)
    donors = [each for each in donors if each[0][0] == donors[0][0][0]]
    _, _, record, old, theirs, here = donors[0] if alike else rng.choice(donors[:NEAREST])
    renaming = Renaming({old: value})
    for (where, spot), id in record.spots.items():
        if where == theirs and (here, spot) in spots:
            renaming.setdefault(id, spots[here, spot])
    for one, other in zip(json.loads(theirs[1]).values(), json.loads(here[1]).values(), strict=False):
        renaming.setdefault(str(one), str(other))
    return _Origin(record, old, renaming)


def _similarity(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / (len(one | other) or 1)


def _facts(records: Records, documents: Mapping[Place, Any], request: str, message: str) -> tuple[list[str], list[str]]:
    """Facts that the message must tell, and values that it must not."""
    told_text, request_text = f" {' '.join(words(message))} ", f" {' '.join(words(request))} "
    told = {word for word in words(message) if any(map(str.isdigit, word)) and f" {word} " not in request_text}
    untold = set[str]()
    for field, text in _fields(documents):
        if f" {text} " in told_text and f" {text} " not in request_text:
            told.add(text)
            others = {other for each in records.all for place, other in _fields(each.documents) if place == field}
            words_only = (other for other in others if not any(map(str.isdigit, other)))
            untold |= {other for other in words_only if f" {other} " not in told_text + request_text}
    return sorted(told), sorted(untold)


def _fields(documents: Mapping[Place, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(tool and keys, text normalised by `words`) of each scalar in the documents."""
    for (tool, _), document in documents.items():
        for path, value in walk(document):
            is_field = bool(path) and isinstance(value, (str, int, float)) and not isinstance(value, bool)
            if is_field and (text := " ".join(words(str(value)))):
                yield (tool, *(step if isinstance(step, str) else "" for step in path)), text


def verified(world: Compiled, records: Records, task: Task) -> Task | str:
    """The task with the world's answers to its reference; or the reason to drop it.

    The answer to a writing call may differ in texts that the last message does not tell.
    """
    calls, steps = [list(each) for each in task.drawn["documents"]], list[list[str]]()
    writes, styles = records.recordings.writes, records.recordings.styles
    told = set(words(message_text(task.drawn["steps"][-1][0])))
    for action, expected in task.drawn["steps"]:
        if (call := parse_call(action)) is not None:
            answer = world.answer(task.id, calls, call.name, call.arguments)
            if answer is None:
                return f"{call.name} is not answered"
            if isinstance(answer, Refusal):
                return f"{call.name} answers otherwise"
            lost = set(words(expected)) - set(words(answer))
            form, expected_form = (_structure(parsed(text, styles[call.name])) for text in (answer, expected))
            if answer != expected and (call.name not in writes or form != expected_form or lost & told):
                return f"{call.name} answers otherwise"
            calls.append([call.name, dict(call.arguments), answer])
            expected = answer
        steps.append([action, expected])
    return replace(task, drawn={**task.drawn, "steps": steps})


def _structure(node: Any) -> Any:
    """The structure of a document: keys and types. Texts in lists or alone keep all but digits."""
    if isinstance(node, dict):
        return {key: type(value).__name__ if isinstance(value, str) else _structure(value) for key, value in node.items()}
    if isinstance(node, list):
        return list(map(_structure, node))
    return re.sub(r"\d+", "0", node) if isinstance(node, str) else type(node).__name__
