"""Variations of a tool agent's tasks without any model: a recorded request with the values of another trace."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from random import Random
from typing import Any, NamedTuple

from dreamgym_lg.actions import ToolCall, parse_action, render_call
from dreamgym_lg.curriculum.task_generator import Overlap, variation, words
from dreamgym_lg.experience.prompt_formats import first_observation
from dreamgym_lg.types import Task, Trajectory

Scalar = str | int | float | bool | None
Place = tuple[str, ...]
"""Where a value stands: `call`, `answer` or `metadata`, the tool's name, then keys and numbers down to the value."""
Kind = tuple[tuple[str, ...], ...]
"""Of each call the tool, and those arguments that are no values of a request of its own, such as a reason."""

_DONORS = 200
"""Traces whose values are tried for one variation."""
_ALIKE = 0.5
"""`Overlap` of two requests, their values aside, from which they ask alike."""
_EMPTY: Mapping[str, Scalar] = {"": None}
_FLAG = 6
"""Most values of a place, in all traces, that make it a condition whatever they are."""
_OWN = ("observation", "tools", "rubric", "generated", "reference_calls")
"""Metadata that is no fact of the task's world."""


class Play(NamedTuple):
    """A recorded episode of a tool agent: its calls, what came back, and its last words."""

    task: Task
    success: bool
    calls: tuple[ToolCall, ...]
    answers: tuple[Any, ...]
    """Of each call: the JSON value that its text is, else the list of its words."""
    said: str
    """The final answer; "" where there is none or it was not the only one."""

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(call.name for call in self.calls)

    def values(self) -> Iterator[tuple[Place, Scalar]]:
        """Every value with its place, calls before answers."""
        for call in self.calls:
            yield from _leaves(call.arguments, ("call", call.name))
        for call, answer in zip(self.calls, self.answers, strict=True):
            yield from _leaves(answer, ("answer", call.name))
        yield from _leaves({key: value for key, value in self.task.metadata.items() if key not in _OWN}, ("metadata",))


class Success(NamedTuple):
    """What a recorded success says of the cases in which its calls are right."""

    request: frozenset[str]
    """Its words, without its values."""
    kind: Kind
    tools: frozenset[str]
    values: Mapping[Place, Mapping[str, Scalar]]


class TemplateTaskGenerator:
    """A `TaskGenerator` that puts another trace's values (ids, names, amounts, dates) into a recorded request.

    The values of a request are found by comparing it with its trace: what stands in the request and in a call's arguments or
    answers. The variation has the same wording, and all its values from one other trace. It is taken only if the recorded
    success can be carried over call by call:

    * each call that reads was recorded with the new values, and always answered alike: its answer replaces the old one;
    * the new answers make a case that a recorded success with the same calls and a similar request has been in: where those
      have few values (a status, a tier), one of these; an amount or date between theirs; anything else (an id, a name) may be
      new;
    * a call that writes takes its arguments from the request and from these answers.

    A success that looked up less than most with a similar request is no seed: it was right by luck.

    The calls so made are `metadata["reference_calls"]`, as action texts. The rubric is the seed task's with the new values,
    else it is written from these calls.

    Args:
        trajectories: Real ones of training tasks; seeds are the successes among them.
        writes: Whether a tool, by name, changes the world.
    """

    def __init__(self, trajectories: Sequence[Trajectory], *, writes: Callable[[str], bool]) -> None:
        self._writes = writes
        plays = [play for each in trajectories if each.task.split == "train" and (play := _play(each)) is not None]
        self._donors = [(play, _by_place(play)) for play in plays]
        self._requests = {first_observation(play.task) for play in plays}
        self._answers: dict[str, list[Any]] = defaultdict(list)
        counts: dict[Place, Counter[str]] = defaultdict(Counter)
        for play in plays:
            for call, answer in zip(play.calls, play.answers, strict=True):
                known = self._answers[render_call(*call)]
                known += [answer] if answer not in known else []
            for place, value in play.values():
                counts[place][_text(value)] += 1
        # few values for many traces: a status, a kind, a currency
        self._categorical = {place for place, found in counts.items() if len(found) ** 2 <= found.total() > 1}
        self._flags = {place for place, found in counts.items() if len(found) <= _FLAG}
        rubrics = Counter(str(play.task.metadata.get("rubric") or "") for play in plays)
        self._rules = {rubric for rubric, number in rubrics.items() if number > 1}
        requests = [_masked(play, self._slots(play)) for play in plays]
        self._overlap = Overlap(requests)
        self._successes = [
            Success(words(request), self._kind(play), frozenset(play.tools), _by_place(play))
            for play, request in zip(plays, requests, strict=True)
            if play.success
        ]
        self._seeds: dict[str, Play] = {}
        for play in plays:
            if play.success and self._slots(play):
                self._seeds.setdefault(play.task.id, play)
                self._seeds.setdefault(first_observation(play.task), play)

    @property
    def can_vary(self) -> bool:
        """Whether the traces hold a request whose values could be exchanged."""
        return bool(self._seeds) and len(self._donors) > 1

    def __call__(self, task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
        """As `TaskGenerator`; None without a recorded success of `task`, or of the task that it was itself varied from."""
        seed = self._seeds.get(task.id) or self._seeds.get(first_observation(task))
        seed = seed or self._seeds.get(task.metadata.get("generated", {}).get("seed", ""))
        if seed is None or task.split != "train":
            return None
        slots = self._slots(seed)
        successes = self._alike(seed, slots)
        for donor, offered in rng.sample(self._donors, min(_DONORS, len(self._donors)) if successes else 0):
            if (found := self._carried_over(seed, slots, offered, successes)) is not None:
                varied = self._vary(task, seed, donor, *found)
                if varied is not None and first_observation(varied) not in self._requests:
                    return varied
        return None

    def _slots(self, play: Play) -> dict[str, list[Place]]:
        """The values in the request that are the trace's own, and where else in the trace each stands."""
        request = first_observation(play.task)
        slots: dict[str, list[Place]] = defaultdict(list)
        for place, value in play.values():
            text = _text(value)
            short = len(text) < 3 and place[0] != "call"  # a 2 in an answer is not the 2 of "2 days ago"
            if place not in self._categorical and text and not short and _whole(text).search(request):
                slots[text].append(place)
        return slots

    def _carried_over(
        self,
        seed: Play,
        slots: Mapping[str, Sequence[Place]],
        offered: Mapping[Place, Mapping[str, Scalar]],
        successes: Sequence[Success],
    ) -> tuple[dict[str, Scalar], list[ToolCall]] | None:
        """The new value of each old one, and the seed's calls with them; None where the two traces do not fit."""
        exchanged: dict[str, Scalar] = {}
        for text, places in slots.items():
            taken = {_text(value) for value in exchanged.values()}  # two orders stay two
            free = ((place, new, value) for place in places for new, value in offered.get(place, {}).items())
            pairs = ((place, value) for place, new, value in free if new not in taken)
            if (pair := next(pairs, None)) is None or not self._same_case(successes, dict([pair])):
                return None
            exchanged[text] = pair[1]
        if all(old == _text(new) for old, new in exchanged.items()):
            return None
        calls, case, request = list[ToolCall](), dict[Place, Scalar](), first_observation(seed.task)
        for call, answer in zip(seed.calls, seed.answers, strict=True):
            arguments = _leaves(call.arguments, ("call", call.name))
            if not all(self._explained(place, value, exchanged, request) for place, value in arguments):
                return None
            calls.append(ToolCall(call.name, _exchange(call.arguments, exchanged)))
            if self._writes(call.name):
                continue
            known = self._answers.get(render_call(*calls[-1]), [])
            if len(known) != 1 or not self._learn(exchanged, case, call.name, answer, known[0], successes):
                return None
        return (exchanged, calls) if any(not self._writes(call.name) for call in calls) else None

    def _alike(self, seed: Play, slots: Mapping[str, Sequence[Place]]) -> list[Success]:
        """The successes with the same calls whose requests ask alike; none if most of those that ask alike looked up more."""
        request, kind = words(_masked(seed, slots)), self._kind(seed)
        alike = [each for each in self._successes if self._overlap(request, each.request) >= _ALIKE]
        looked_up = Counter(tool for each in alike for tool in each.tools if not self._writes(tool))
        if any(2 * number > len(alike) and tool not in seed.tools for tool, number in looked_up.items()):
            return []
        return [each for each in alike if each.kind == kind]

    def _kind(self, play: Play) -> Kind:
        constant = [
            (value for place, value in _leaves(call.arguments, ("call", call.name)) if place in self._categorical)
            for call in play.calls
        ]
        return tuple((call.name, *map(_text, found)) for call, found in zip(play.calls, constant, strict=True))

    def _same_case(self, successes: Sequence[Success], found: Mapping[Place, Scalar]) -> bool:
        """Whether these values make a case that these successes have been in."""
        seen = {place: set[str]().union(*(each.values.get(place, _EMPTY) for each in successes)) for place in found}
        conditions = {
            place: _text(found[place])
            for place, texts in seen.items()
            if place in self._flags or len(texts) ** 2 <= len(successes)
        }
        alike = [
            each for each in successes if all(text in each.values.get(place, _EMPTY) for place, text in conditions.items())
        ]
        for place, value in found.items():
            if (number := _number(value)) is not None:
                known = [size for each in alike for text in each.values.get(place, ()) if (size := _number(text)) is not None]
                if not known or not min(known) <= number <= max(known):
                    return False
        return bool(alike)

    def _learn(
        self,
        exchanged: dict[str, Scalar],
        case: dict[Place, Scalar],
        tool: str,
        old: Any,
        new: Any,
        successes: Sequence[Success],
    ) -> bool:
        """Add what a new answer says in place of the old one; False if that makes it another case, or cannot be told."""
        before, after = dict(_leaves(old, ("answer", tool))), dict(_leaves(new, ("answer", tool)))
        case |= after
        if before.keys() != after.keys() or not self._same_case(successes, case):
            return False
        for place, value in before.items():
            if isinstance(value, bool | None) or not _text(value):
                continue
            if _text(exchanged.setdefault(_text(value), after[place])) != _text(after[place]):
                return False  # one old value would have to become two
        return True

    def _explained(self, place: Place, value: Scalar, exchanged: Mapping[str, Scalar], request: str) -> bool:
        """Whether it is known what this argument of a call has to be in the variation."""
        text = _text(value)
        return not text or text in exchanged or place in self._categorical or text in request

    def _vary(self, task: Task, seed: Play, donor: Play, exchanged: dict[str, Scalar], calls: list[ToolCall]) -> Task | None:
        facts = self._facts(seed, donor, exchanged)
        if facts is None:
            return None
        made = [render_call(*call) for call in calls]
        why = f"the request of {seed.task.id} with the values of {donor.task.id}, whose answers are recorded"
        return variation(
            task,
            _exchange(first_observation(seed.task), {old: exchanged[old] for old in self._slots(seed)}),
            rubric=self._rubric(seed, exchanged, made),
            generated={"generator": "templates", "why": why, "seed": seed.task.id},
            metadata={**task.metadata, **facts, "reference_calls": made},
        )

    def _rubric(self, seed: Play, exchanged: Mapping[str, Scalar], made: Sequence[str]) -> str:
        own = str(seed.task.metadata.get("rubric") or "")
        if own:
            return own if own in self._rules else _exchange(own, exchanged)
        said = f' An answer that fits: "{_exchange(seed.said, exchanged)}"' if seed.said else ""
        calls = "; ".join(made)
        return (
            f"A success makes these calls, or others to the same effect, and changes nothing else: {calls}. Its answer agrees "
            f"with what they returned.{said}"
        )

    def _facts(self, seed: Play, donor: Play, exchanged: Mapping[str, Scalar]) -> dict[str, Any] | None:
        """The task's own facts with the new values; what the records do not tell is the donor's, None if that has none."""
        facts = {key: value for key, value in seed.task.metadata.items() if key not in _OWN}
        others = dict(_leaves(donor.task.metadata, ("metadata",)))
        known = dict(exchanged)
        for place, value in _leaves(facts, ("metadata",)):
            if not _text(value) or _text(value) in known or place in self._categorical:
                continue
            if place not in others:
                return None
            known[_text(value)] = others[place]
        return dict(_exchange(facts, known))


def _masked(play: Play, slots: Mapping[str, Sequence[Place]]) -> str:
    """The request without its values."""
    return str(_exchange(first_observation(play.task), dict.fromkeys(slots, "")))


def _by_place(play: Play) -> dict[Place, dict[str, Scalar]]:
    """The values that stand in each place, under their texts."""
    found: dict[Place, dict[str, Scalar]] = defaultdict(dict)
    for place, value in play.values():
        if text := _text(value):
            found[place].setdefault(text, value)
    return found


def _play(trajectory: Trajectory) -> Play | None:
    """A trajectory as calls and answers; None for an agent that calls no tool, and after malformed or invalid calls."""
    calls, answers, said = list[ToolCall](), list[Any](), list[str]()
    for step in trajectory.steps:
        try:
            action = parse_action(step.action)
        except ValueError:
            return None
        if isinstance(action, str):
            said.append(action)
        elif not step.valid:
            return None
        else:
            calls.append(action)
            answers.append(_parsed(step.next_observation))
    talked = len(said) > 1  # the user said more, which belongs to that request alone
    success = trajectory.success and not talked
    return Play(trajectory.task, success, tuple(calls), tuple(answers), said[-1] if said else "") if calls else None


def _parsed(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text.split()
    return found if isinstance(found, dict | list) else text.split()


def _leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Scalar]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*place, str(key)))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*place, str(number)))
    else:
        yield place, value


def _text(value: Scalar) -> str:
    """As it would stand in a sentence."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value).strip(".,;:!?()\"'")


def _number(value: Scalar) -> float | None:
    """The size of an amount or date; None for what has none."""
    if isinstance(value, str):
        text = _text(value)
        try:
            return float(text)
        except ValueError:
            try:
                return float(date.fromisoformat(text[:10]).toordinal())
            except ValueError:
                return None
    return None if value is None or isinstance(value, bool) else float(value)


def _whole(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){re.escape(text)}(?![\w-])")


def _exchange(value: Any, exchanged: Mapping[str, Scalar]) -> Any:
    """The value with every old value in it replaced by its new one, in texts too."""
    if isinstance(value, Mapping):
        return {key: _exchange(inner, exchanged) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_exchange(inner, exchanged) for inner in value]
    if isinstance(value, str):
        old = sorted((text for text in exchanged if text), key=len, reverse=True)
        pattern = "|".join(_whole(text).pattern for text in old)
        return re.sub(pattern, lambda match: _text(exchanged[match[0]]), value) if old else value
    new = exchanged.get(_text(value), value) if not isinstance(value, bool | None) else value
    number = _number(new) if isinstance(new, str) else None  # a word of an answer, where the argument is a number
    return new if number is None else int(number) if number.is_integer() else number
