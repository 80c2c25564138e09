"""What real traces hold, by what it is looked up with: the answers of calls, and the effects and facts of successes."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dreamgym_lg.actions import is_answer, parse_action, parse_call
from dreamgym_lg.experience.answer_facts import FREE_TEXT_WORDS, Answered, Facts, Told, Vocabulary
from dreamgym_lg.replay.buffer import Record


class Call(NamedTuple):
    """A tool call in the one form in which calls are compared: defaults filled in, arguments in order, 20.0 as 20."""

    tool: str
    arguments: tuple[tuple[str, Any], ...]
    """Names and values; a value that is a list or an object, as JSON."""


Effects = tuple[Call, ...]
"""Writing calls, without the wording of free text."""

References = Mapping[Effects, Sequence[Facts | None]]
"""The effects of recorded successes; under no effects at all, the facts of each answer, None where it tells none."""

_Question = tuple[str, Call, Effects]
"""A task's id, or `/` and an environment's name; a call; the writing calls before it, in their order."""
_Answer = tuple[str, bool]
"""What a call was answered, and whether it was valid."""


class Votes(NamedTuple):
    """The recordings of one answer to one call."""

    number: int
    reasoning: str
    """What the first of them was annotated with."""


NO_VOTES = Votes(0, "")


class RecordedIndex:
    """Answers and effects by what they are looked up with, each with the number of its recordings."""

    def __init__(self, writes: Callable[[str], bool], free_text: frozenset[tuple[str, str]]) -> None:
        self.writes, self.free_text = writes, free_text
        self.answers: dict[_Question, dict[_Answer, Votes]] = {}
        self.successes: dict[tuple[str, ...], dict[Effects, list[Facts | None]]] = {}
        self.vocabulary = Vocabulary((), ())
        self._asked: list[tuple[Record, Answered]] = []
        """The successes that wrote nothing."""

    def add(self, record: Record, calls: Sequence[Call | None]) -> None:
        """Args: `calls`, what each step called; None for anything but a call."""
        effects: Effects = ()
        scopes = worlds_of(record.task_id, record.environment) if answers_others(record) else ()
        for call, (_, answer, valid, reasoning) in zip(calls, record.steps, strict=True):
            if call is None:
                continue
            for scope in scopes:
                answers = self.answers.setdefault((scope, call, effects), {})
                before = answers.get((answer, valid))
                answers[answer, valid] = Votes(1, reasoning) if before is None else Votes(before.number + 1, before.reasoning)
            if self.writes(call.tool):
                effects += self.effects([(call, valid)])
        # Several answers are several turns of a user, and a dreamed episode ends with its first.
        said = [step[0] for call, step in zip(calls, record.steps, strict=True) if call is None]
        if record.success and not any(map(is_answer, said[:-1])):
            for key in _scopes(record):
                self.successes.setdefault(key, {}).setdefault(unordered(effects), [])
            if not effects:
                answer = str(parse_action(said[-1])) if said and is_answer(said[-1]) else ""
                self._asked.append((record, Answered(record.request, _told_in(record), answer)))

    def read_answers(self, records: Iterable[Record], opaque: Collection[str]) -> None:
        """Find the facts of the successes that wrote nothing. Args: `opaque`, as of `Vocabulary`."""
        told = {each: None for record in records if answers_others(record) for each in _told_in(record)}
        self.vocabulary = Vocabulary(told, (each for record, each in self._asked if answers_others(record)), opaque=opaque)
        for record, answered in sorted(self._asked, key=lambda each: not each[1].told):
            facts = self.vocabulary.facts(answered)
            for key in _scopes(record):
                known = self.successes[key][()]
                if facts not in known and (answered.told or not known):  # a right guess says nothing beside a lookup
                    known.append(facts)

    def effects(self, calls: Iterable[tuple[Call | None, bool]]) -> Effects:
        """The writing calls among (call, valid), in their order."""
        return tuple(self._without_wording(each) for each, valid in calls if each and valid and self.writes(each.tool))

    def _without_wording(self, call: Call) -> Call:
        if not any(tool == call.tool for tool, _ in self.free_text):
            return call
        free = {name for name, value in call.arguments if (call.tool, name) in self.free_text and _is_text(value)}
        return Call(call.tool, tuple((name, "..." if name in free else value) for name, value in call.arguments))


def worlds_of(task_id: str, environment: str) -> tuple[str, str]:
    """Where a trace's answers are kept, the nearest first: for its task, and for all of its world."""
    return task_id, f"/{environment}"


def success_keys(task_id: str, environment: str, instruction: str, split: str) -> tuple[tuple[str, ...], ...]:
    """Where a trace's effects are kept: for its task, and for its instruction; those of evaluation tasks apart."""
    return (task_id,), ("train" if split == "train" else "evaluation", environment, instruction)


def _scopes(record: Record) -> tuple[tuple[str, ...], ...]:
    return success_keys(record.task_id, record.environment, record.instruction, record.split)


def answers_others(record: Record) -> bool:
    return record.split == "train"


def _told_in(record: Record) -> tuple[Told, ...]:
    """What the tools answered, unless they refused."""
    made = ((parse_call(action), answer) for action, answer, valid, _ in record.steps if valid)
    return tuple((call.name, answer) for call, answer in made if call is not None)


def comparable_call(action: str, defaults: Mapping[str, Mapping[str, Any]]) -> Call | None:
    if (call := parse_call(action)) is None:
        return None
    given = {**defaults.get(call.name, {}), **call.arguments}
    return Call(call.name, tuple((name, _comparable(given[name])) for name in sorted(given)))


def _comparable(value: Any) -> Any:
    """A value that can be hashed; numbers compare as they do in Python (20.0 is 20), truth values are no numbers."""
    if value is None or isinstance(value, str | int | float) and not isinstance(value, bool):
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def unordered(effects: Effects) -> Effects:
    """In an order that does not depend on which tool was called first; one tool's calls keep theirs."""
    return tuple(sorted(effects, key=lambda call: call.tool))


def find_free_text(records: Iterable[Record], writes: Callable[[str], bool]) -> frozenset[tuple[str, str]]:
    """The (tool, argument) of writing calls that mostly hold free text: several words that were not copied from anything seen.

    Two episodes never word a reason alike; an address, copied from the instruction, has to be right.
    """
    free, given = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for record in records:
        for position, (action, *_) in enumerate(record.steps):
            if (call := parse_call(action)) is None or not writes(call.name):
                continue
            texts = {name: value for name, value in call.arguments.items() if _is_text(value)}
            given.update((call.name, name) for name in texts)
            long = {name: value for name, value in texts.items() if len(value.split()) >= FREE_TEXT_WORDS}
            seen = _words([record.instruction, *(step[1] for step in record.steps[:position])]) if long else ""
            free.update((call.name, name) for name, value in long.items() if _words([value]) not in seen)
    return frozenset(key for key, count in free.items() if 2 * count > given[key])


def _words(texts: Iterable[str]) -> str:
    return " ".join(" ".join(texts).lower().split())
