"""Recorded successes of a tool agent made wrong: episodes that must not be paid, where real failures are few.

An edit is kept only if nothing recorded says that it could be right after all: each success of the same request is asked.
A request whose successes write (change the world) is missed where one of their writing calls is; one that only reads is
missed by an answer that says another thing than what was looked up. Whatever cannot be told is left out.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from dreamgym_lg.actions import ToolCall, parse_action, render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.prompt_formats import first_observation
from dreamgym_lg.types import Step, Trajectory

# A writing call with such an answer may have changed nothing.
_DOUBTFUL = re.compile(
    r"\b(errors?|fail(ed|s|ure)?|cannot|can't|could not|not|no|invalid|denied|refused|rejected|unknown|unable|already|unchanged"
    r"|exceeds?|missing|must)\b",
    re.IGNORECASE,
)


def edited_successes(
    successes: Sequence[Trajectory], *, writes: Collection[str] = (), per_success: int = 3, seed: int = 0
) -> list[Trajectory]:
    """Episodes that must not be paid, made from successful ones of a tool agent.

    Pure: the same arguments give the same edits. They are for training and judging an experience model, and are never stored
    as real data: `source="synthetic"`, `run="edited/<kind>"`, `success=False`, every reward 0. Each keeps its original's task.

    The kinds: `left_out` (all calls of one writing tool), `other_argument` (another request's id or amount, with what the
    tools recorded for it), `other_answer` (the final answer to another request), `answered_at_once` (without a call),
    `escalated_at_once` (the writing call with which another request ended, before anything was looked up).

    Args:
        successes: Recorded episodes that ended in success. Those of another form than tool calls and one final answer at the
            end, and those without a call, give no edits.
        writes: The names of the tools that change the world; every other tool only reads.
        per_success: Edits of one success at most, each of another kind.

    Raises `ConfigurationError` for an episode that is no success.
    """
    if per_success < 1:
        raise ConfigurationError(f"per_success={per_success}: at least 1")
    for each in successes:
        if not each.success or each.error:
            raise ConfigurationError(f"an episode of task {each.task.id!r} is no success: give successful episodes alone")
    read = [_Success(each, frozenset(writes)) for each in successes if _has_form(each)]
    editor = _Editor(read)
    found: dict[tuple[str, ...], Trajectory] = {}
    counted: dict[tuple[str, str], int] = defaultdict(int)
    for number, success in enumerate(read):
        rng = random.Random(f"{seed}/{number}/{success.trajectory.task.id}")
        for kind, steps in editor.edits(success, rng, per_success):
            task = success.trajectory.task
            key = (task.id, *(step.action for step in steps))
            if key not in found:
                found[key] = _edited(success.trajectory, kind, steps, counted[kind, task.id])
                counted[kind, task.id] += 1
    return list(found.values())


class _Success:
    """A success with what its guards need to know."""

    def __init__(self, trajectory: Trajectory, writes: Collection[str]) -> None:
        self.trajectory, self.writes = trajectory, writes
        *self.steps, self.last = trajectory.steps
        self.calls: list[ToolCall] = [_call(step) for step in self.steps]
        self.answer = str(parse_action(self.last.action))
        self.request = (trajectory.task.instruction, first_observation(trajectory.task))
        written = [step for step, call in zip(self.steps, self.calls, strict=True) if call.name in writes and step.valid]
        self.unsure = any(_DOUBTFUL.search(step.next_observation) for step in written)
        self.effects = frozenset(step.action for step in written if not _DOUBTFUL.search(step.next_observation))

    @cached_property
    def told(self) -> frozenset[str]:
        """Every word that the request or a tool said."""
        return _words(" ".join([*self.request, *(step.next_observation for step in self.steps)]))

    @cached_property
    def found_out(self) -> frozenset[str]:
        """The words of the answer that only a tool could have told."""
        looked_up = _words(" ".join(step.next_observation for step in self.steps))
        found = (_words(self.answer) & looked_up) - _words(" ".join(self.request))
        return frozenset(word for word in found if len(word) > 3 or not word.isalpha())

    def answers_otherwise(self, right: "_Success") -> bool:
        """Whether this answer, given to the request of `right`, is surely wrong: it says nothing of what was found out
        there, and something that nobody there was told."""
        silent = right.found_out and not right.found_out & _words(self.answer)
        return bool(silent and self.found_out - right.told)

    def certain(self, name: str) -> bool:
        """Whether the tool writes, and all its calls in this episode did what they should."""
        steps = [step for step, call in zip(self.steps, self.calls, strict=True) if call.name == name]
        return name in self.writes and all(step.valid and step.action in self.effects for step in steps)


class _Edit(NamedTuple):
    steps: Sequence[Step]
    """The calls."""
    answered_by: _Success
    """Whose final answer ends the episode."""


class _Editor:
    """Proposes edits of every kind, and drops those that could be right."""

    def __init__(self, successes: Sequence[_Success]) -> None:
        self.successes = successes
        self.same: dict[tuple[str, str], list[_Success]] = defaultdict(list)
        for success in successes:
            self.same[success.request].append(success)
        self.optional = self._optional()
        self.kinds: Mapping[str, Callable[[_Success, random.Random], Iterator[_Edit]]] = {
            "left_out": self.left_out,
            "other_argument": self.other_argument,
            "other_answer": self.other_answer,
            "answered_at_once": self.answered_at_once,
            "escalated_at_once": self.escalated_at_once,
        }

    def edits(self, success: _Success, rng: random.Random, wanted: int) -> Iterator[tuple[str, Sequence[Step]]]:
        """At most `wanted` edits, each of another kind, kinds in random order."""
        for kind in rng.sample(list(self.kinds), len(self.kinds)):
            if wanted and (edit := next((e for e in self.kinds[kind](success, rng) if self.is_wrong(e, success)), None)):
                wanted -= 1
                yield kind, [*edit.steps, replace(edit.answered_by.last, next_observation=success.last.next_observation)]

    def is_wrong(self, edit: _Edit, success: _Success) -> bool:
        """Whether no success of the same request allows this episode to be one."""
        effects = {step.action for step in edit.steps}
        return all(
            not needed <= effects if (needed := self._needed(right)) else self._only_answers(right, edit)
            for right in self.same[success.request]
        )

    def _only_answers(self, right: _Success, edit: _Edit) -> bool:
        return not right.unsure and not right.effects and edit.answered_by.answers_otherwise(right)

    def _needed(self, success: _Success) -> set[str]:
        return {action for action in success.effects if _name(action) not in self.optional}

    def _optional(self) -> set[str]:
        """Writing tools that one success of a request calls and another, else with the same effects, does not."""
        pairs = [(a.effects, b.effects) for same in self.same.values() for a in same for b in same]
        more = [{_name(action) for action in mine - other} for mine, other in pairs if other < mine]
        return {name for names in more if len(names) == 1 for name in names}

    def _others(self, success: _Success, rng: random.Random) -> list[_Success]:
        others = [other for other in self.successes if other.request != success.request]
        return rng.sample(others, len(others))

    def left_out(self, success: _Success, rng: random.Random) -> Iterator[_Edit]:
        """All calls of a writing tool, so that no second try stays, and what was read after the first of them."""
        names = sorted({call.name for call in success.calls if success.certain(call.name)} - self.optional)
        for name in rng.sample(names, len(names)):
            first = next(number for number, call in enumerate(success.calls) if call.name == name)
            after = list(zip(success.steps, success.calls, strict=True))[first:]
            kept = [step for step, call in after if call.name in success.writes and call.name != name]
            learnt = _words(success.steps[first].next_observation) - _words(_said(success, first))
            if not any(learnt & _words(step.action) for step in kept):  # else a later call needs what this one told
                yield _Edit([*success.steps[:first], *map(_unexplained, kept)], success)

    def other_argument(self, success: _Success, rng: random.Random) -> Iterator[_Edit]:
        """The whole of another request's episode, or its value in the last call of a writing tool."""
        others = [other for other in self._others(success, rng) if self._comparable(other, success)]
        whole = (_Edit([_unexplained(step) for step in other.steps], other) for other in others)
        proposals = [whole, self._substituted(success, others)]
        for proposal in rng.sample(proposals, 2):
            yield from proposal

    def _comparable(self, other: _Success, success: _Success) -> bool:
        """Whether it made the same calls, about another thing; where the success writes, it wrote about another thing."""
        if [call.name for call in other.calls] != [call.name for call in success.calls]:
            return False
        names = (success.calls[number].name for number, *_ in _swaps(other, success))
        return any(success.certain(name) or not success.effects for name in names)

    def _substituted(self, success: _Success, others: Sequence[_Success]) -> Iterator[_Edit]:
        for other in others:
            for number, field, old, new in _swaps(other, success):
                call = success.calls[number]
                later = [each.name for each in success.calls[number + 1 :]]
                if not success.certain(call.name) or call.name in self.optional or call.name in later:
                    continue
                changed = Step(
                    observation="",
                    action=render_call(call.name, {**call.arguments, field: new}),
                    next_observation=_put(success.steps[number].next_observation, old, new),
                )
                rest = zip(success.steps[number + 1 :], success.calls[number + 1 :], strict=True)
                kept = [_unexplained(step) for step, each in rest if each.name in success.writes]
                yield _Edit([*success.steps[:number], changed, *kept], success)

    def other_answer(self, success: _Success, rng: random.Random) -> Iterator[_Edit]:
        """Only of requests that change nothing: elsewhere the words of the answer may not matter (`is_wrong`)."""
        yield from (_Edit(success.steps, other) for other in self._others(success, rng))

    def answered_at_once(self, success: _Success, rng: random.Random) -> Iterator[_Edit]:
        """With its own answer, as if all had been done, or with another's."""
        own, others = [success], self._others(success, rng)
        yield from (_Edit((), each) for each in (own + others if rng.random() < 0.5 else others + own))

    def escalated_at_once(self, success: _Success, rng: random.Random) -> Iterator[_Edit]:
        used = {call.name for same in self.same[success.request] for call in same.calls} | self.optional
        for other in self._others(success, rng):
            *_, (step, call) = zip(other.steps, other.calls, strict=True)
            if call.name not in used and other.certain(call.name):
                yield _Edit([_about(success, step, call)], other)


def _has_form(trajectory: Trajectory) -> bool:
    """Whether these are tool calls and, at the end alone, an answer."""
    kinds = []
    for step in trajectory.steps:
        try:
            kinds.append(type(parse_action(step.action)))
        except ValueError:
            return False
    return len(kinds) > 1 and kinds[-1] is str and all(kind is ToolCall for kind in kinds[:-1])


def _edited(original: Trajectory, kind: str, steps: Sequence[Step], index: int) -> Trajectory:
    """The steps as an episode: each observes what the one before brought, and nothing is paid."""
    observation, chained = original.steps[0].observation, []
    for number, step in enumerate(steps, start=1):
        last = number == len(steps)
        step = replace(step, observation=observation, reward=0.0, terminated=last, truncated=False)
        chained.append(_unexplained(step) if last else step)  # why a success ended as one explains no failure
        observation = step.next_observation
    run = f"edited/{kind}"
    return Trajectory(task=original.task, steps=chained, source="synthetic", success=False, run=run, rollout_index=index)


def _unexplained(step: Step) -> Step:
    """The step without reasoning, which was about another history."""
    return replace(step, reasoning="")


def _call(step: Step) -> ToolCall:
    call = parse_action(step.action)
    assert isinstance(call, ToolCall)
    return call


def _name(action: str) -> str:
    return str(json.loads(action)["name"])


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.casefold()))


def _said(success: _Success, number: int) -> str:
    """What was known before call `number`."""
    return " ".join([*success.request, *(step.next_observation for step in success.steps[:number])])


def _swaps(other: _Success, success: _Success) -> Iterator[tuple[int, str, Any, Any]]:
    """(position, argument, value here, value there) where an id, amount or address of another request differs.

    The value here was told before the call, and the one there is not part of this request; if this request does not name its
    own, nobody in this episode has heard of the other one either.
    """
    request = " ".join(success.request)
    theirs = [(call.name, field, value) for call in other.calls for field, value in call.arguments.items()]
    for number, call in enumerate(success.calls):
        for field, old in call.arguments.items():
            if not _identifies(old) or not _names(_said(success, number), old):
                continue
            known = request if _names(request, old) else _said(success, len(success.steps))
            for name, their_field, new in theirs:
                differs = _plain(old) not in _plain(new) and _plain(new) not in _plain(old)
                if (name, their_field) == (call.name, field) and _identifies(new) and differs and not _names(known, new):
                    yield number, field, old, new


def _identifies(value: object) -> bool:
    """Whether the value is an id, an amount, a date or an address, not free words: those may be put in many ways."""
    return isinstance(value, str | int | float) and not isinstance(value, bool) and bool(re.search(r"[\d@]", str(value)))


def _plain(value: object) -> str:
    return re.sub(r"\.0+$|[\W_]", "", str(value).casefold())


def _names(text: str, value: object) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", text, re.IGNORECASE))


def _put(text: str, old: object, new: object) -> str:
    return re.sub(rf"(?<!\w){re.escape(str(old))}(?!\w)", lambda _: str(new), text)


def _about(success: _Success, step: Step, call: ToolCall) -> Step:
    """Another request's call, with this one's own values where it has some for the same arguments."""
    own = {field: value for mine in success.calls for field, value in mine.arguments.items()}
    swapped = {field: own[field] for field, value in call.arguments.items() if field in own and _identifies(value)}
    arguments, said = {**call.arguments, **swapped}, step.next_observation
    for field, new in swapped.items():
        old = call.arguments[field]
        said = _put(said, old, new)
        arguments |= {name: _put(text, old, new) for name, text in arguments.items() if isinstance(text, str)}
    return Step(observation="", action=render_call(call.name, arguments), next_observation=said)
