"""Notes: what a tool agent's task leaves open, written down before the first step, so that all its episodes share one world.

"Refund order K12" does not say whether K12 was delivered. Were it made up at each lookup, two episodes of a group that act
differently before it could see different orders, and nobody could judge an episode that never looked. So the experience model
writes down first what the reading tools answer, once per task and world seed. It learns to from recorded episodes, whose
notes are made in hindsight.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dreamgym_lg.actions import ToolCall, parse_call, render_call
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.experience.predictions import check_structure
from dreamgym_lg.types import Prediction, Step, Task, Trajectory

_KEY = "world_notes"
_COMPARED = 20
"""Recorded answers of a tool whose structure its noted answers have to have."""


class Note(NamedTuple):
    """What a reading tool answers before anything is changed."""

    call: ToolCall
    answer: str


def write_notes(notes: Iterable[Note]) -> str:
    """Notes as text, a line each: `get_order {"order_id": "K12"}: {"status": "open"}`.

    The answer is the tool's own, byte for byte, but that each further line of it begins with a space.
    """
    given = ((call.name, json.dumps(call.arguments, sort_keys=True, ensure_ascii=False), answer) for call, answer in notes)
    return "\n".join(f"{name} {arguments}: {answer}".replace("\n", "\n ") for name, arguments, answer in given)


def read_notes(text: str) -> list[Note]:
    """What `write_notes` wrote; of one call noted twice the first. Raises `PredictionFailed` with the line that is no note."""
    found: dict[str, Note] = {}
    for line in re.split(r"\n(?! )", text) if text else ():
        name, _, rest = line.partition(" ")
        try:
            arguments, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            arguments, end = None, 0
        if not name or not isinstance(arguments, dict) or not rest.startswith(":", end):
            raise PredictionFailed(f"{line[:200]!r} is no note; expected a line of tool, arguments as JSON, colon and answer")
        note = Note(ToolCall(name, arguments), rest[end + 1 :].removeprefix(" ").replace("\n ", "\n"))
        found.setdefault(render_call(name, arguments), note)
    return list(found.values())


def notes_to_json(notes: Iterable[Note]) -> list[dict[str, Any]]:
    """Notes as objects of `name`, `arguments` and `answer`."""
    return [{**note.call._asdict(), "answer": note.answer} for note in notes]


def notes_from_json(found: object) -> list[Note]:
    """What `notes_to_json` gives; an answer may be JSON itself in place of a text that holds it.

    Raises `PredictionFailed` for anything else.
    """
    notes = []
    for note in found if isinstance(found, list) else [found]:
        match note:
            case {"name": str(name), "arguments": dict(arguments), "answer": answer, **rest} if not rest:
                told = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
                notes.append(Note(ToolCall(name, arguments), told))
            case _:
                raise PredictionFailed(
                    f"the note {str(note)[:200]!r} is no object of name, arguments and answer; expected "
                    '{"notes": [{"name": ..., "arguments": {...}, "answer": ...}, ...]}'
                )
    return notes


def check_notes(notes: Iterable[Note], reading: Collection[str], recorded: Callable[[str], Sequence[str]]) -> None:
    """Raise `PredictionFailed` for a note of another tool than `reading`, or in another structure than its recorded answers."""
    for call, answer in notes:
        if call.name not in reading:
            raise PredictionFailed(f"a note calls {call.name!r}; expected only tools that read: {', '.join(sorted(reading))}")
        action = render_call(*call)
        steps = [Step(observation="", action=action, next_observation=each) for each in recorded(call.name)[:_COMPARED]]
        check_structure(Prediction("", answer, 0.0, False, False, True), action, steps, recorded)


def notes_of(task: Task) -> str | None:
    """The notes of the task's world as text, "" for a world of which none could be written; None before they are."""
    return task.metadata.get(_KEY)


def with_notes(task: Task, notes: str) -> Task:
    """The task in the world of these notes: every prompt about it shows them."""
    return replace(task, metadata={**task.metadata, _KEY: notes})


def without_notes(task: Task) -> Task:
    """The task before its notes are written."""
    return replace(task, metadata={name: value for name, value in task.metadata.items() if name != _KEY})


def in_noted_world(trajectory: Trajectory, writes: Collection[str]) -> Trajectory:
    """A recorded episode with its task in the world of its notes in hindsight; one whose task has notes as it is."""
    if notes_of(trajectory.task) is not None:
        return trajectory
    return replace(trajectory, task=with_notes(trajectory.task, notes_in_hindsight(trajectory, writes)))


def notes_in_hindsight(trajectory: Trajectory, writes: Collection[str]) -> str:
    """The notes that the world of a recorded episode should have had: its valid calls of reading tools, each once, in order.

    A lookup behind a write counts only if it is about something, and neither it nor its answer names any value that the write
    was given: what the write may have changed was another before.

    Args: `writes`, the tools that change the world; every other only reads.
    """
    found: dict[str, Note] = {}
    changed: set[str] | None = None
    for step in trajectory.steps:
        if not step.valid or (call := parse_call(step.action)) is None or not re.fullmatch(r"\S+", call.name):
            continue  # no tool has a name with a space
        about = _words(json.dumps(list(call.arguments.values()), ensure_ascii=False))
        if call.name in writes:
            changed = (changed or set()) | about
        elif changed is None or about and changed.isdisjoint(about | _words(step.next_observation)):
            found.setdefault(step.action, Note(call, step.next_observation))
    return write_notes(found.values())


def _words(text: str) -> set[str]:
    """The words of a text, which may be JSON with its escaped line breaks."""
    return set(re.findall(r"\w+", re.sub(r"\\[nrt]", " ", text).casefold()))


def thorough(trajectories: Iterable[Trajectory], writes: Collection[str]) -> list[Trajectory]:
    """The successes whose notes an experience model should learn to write, each in its noted world.

    Of those whose first lookup is the same tool's, they are the ones with at least as many notes as half of them have: an
    agent that looked up little leaves notes that do not say what another one would find.
    """
    counted: dict[str, list[tuple[int, Trajectory]]] = {}
    for each in trajectories:
        notes = notes_in_hindsight(each, writes) if each.success else ""
        if read := read_notes(notes):
            noted = replace(each, task=with_notes(each.task, notes))
            counted.setdefault(read[0].call.name, []).append((len(read), noted))
    chosen: list[Trajectory] = []
    for alike in counted.values():
        median = sorted(number for number, _ in alike)[len(alike) // 2]
        chosen += [each for number, each in alike if number >= median]
    return chosen
