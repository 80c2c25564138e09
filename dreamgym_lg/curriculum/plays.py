"""A tool agent's recorded episodes as calls, answers and values, each value with the place where it stands."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

from dreamgym_lg.actions import ToolCall, parse_action
from dreamgym_lg.experience.prompt_formats import first_observation
from dreamgym_lg.types import Task, Trajectory

Scalar = str | int | float | bool | None
Place = tuple[str, ...]
"""Where a value stands: `call`, `answer` or `metadata`, the tool's name, then keys and numbers down to the value. Of a tool's
second call the name is `TOOL 2`: what one order is answered is not what the other is."""
Values = Mapping[Place, Mapping[str, Scalar]]
"""The values of a trace by where they stand, each under its text (`by_place`)."""
_NUMBER = r"(?<![\w-])[\w-]*\d[\w-]*"
"""A word with a digit, as a regular expression."""
_USUAL = 0.2
"""Share of the requests in the same words in which a lookup answered a value, to show that it belongs to what was looked up."""
INTENT = "intent"
"""Metadata by which a trace says what its request asks for, whatever became of it: `refund`, not `refunded`."""
_OWN = (INTENT, "observation", "tools", "rubric", "generated", "reference_calls", "reference_answers", "reference_reply")
"""Metadata that is no fact of the task's world."""


class Play(NamedTuple):
    """A recorded episode of a tool agent: its calls, what came back, and its last words."""

    task: Task
    success: bool
    calls: tuple[ToolCall, ...]
    answers: tuple[Any, ...]
    """Of each call: the JSON value that its text is, else the list of its words."""
    texts: tuple[str, ...]
    """Of each call: its answer as it was."""
    said: str
    """The final answer; "" where there is none or it was not the only one."""

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(call.name for call in self.calls)

    def values(self) -> Iterator[tuple[Place, Scalar]]:
        """Every value with its place, calls before answers."""
        for name, call in zip(self.names(), self.calls, strict=True):
            yield from leaves(call.arguments, ("call", name))
        for name, answer in zip(self.names(), self.answers, strict=True):
            yield from leaves(answer, ("answer", name))
        yield from leaves(self.facts(), ("metadata",))

    def names(self) -> Iterator[str]:
        """The tool of each call as it stands in a `Place`."""
        made = Counter[str]()
        for call in self.calls:
            made[call.name] += 1
            yield call.name if made[call.name] == 1 else f"{call.name} {made[call.name]}"

    def facts(self) -> dict[str, Any]:
        """The task's metadata that are facts of its world."""
        return {key: value for key, value in self.task.metadata.items() if key not in _OWN}


def unnumbered(place: Place) -> Place:
    """The same place, whichever of a tool's calls it is in."""
    return place if place[0] == "metadata" else (place[0], re.sub(r" \d+$", "", place[1]), *place[2:])


def by_place(play: Play) -> Values:
    """The values that stand in each place, under their texts; an answer's empty field, which says something too, under ""."""
    found: dict[Place, dict[str, Scalar]] = defaultdict(dict)
    for place, value in play.values():
        if (text := text_of(value)) or place[0] == "answer":
            found[place].setdefault(text, value)
    return found


def read_play(trajectory: Trajectory) -> Play | None:
    """A trajectory as calls and answers; None after malformed or invalid calls."""
    calls, texts, said = list[ToolCall](), list[str](), list[str]()
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
            texts.append(step.next_observation)
    talked = len(said) > 1  # the user said more, which belongs to that request alone
    success = trajectory.success and not talked
    answers = tuple(map(parsed_answer, texts))
    return Play(trajectory.task, success, tuple(calls), answers, tuple(texts), said[-1] if said else "")


def parsed_answer(text: str) -> Any:
    """The JSON object or array that a tool's answer is, else the list of its words."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text.split()
    return found if isinstance(found, dict | list) else text.split()


def leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Scalar]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, (*place, str(key)))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*place, str(number)))
    else:
        yield place, value


def text_of(value: Scalar) -> str:
    """As it would stand in a sentence."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value).strip(".,;:!?()\"'")


def is_empty(value: Scalar) -> bool:
    """Whether an answer says so that there is nothing: null, no text, or a word for it."""
    return value is None or text_of(value).strip("- ").lower() in ("", "none", "null", "nil", "n/a", "na", "unknown")


def number_of(value: Scalar) -> float | None:
    """The size of an amount or date; None for what has none."""
    if isinstance(value, str):
        text = text_of(value)
        try:
            return float(text)
        except ValueError:
            try:
                return float(date.fromisoformat(text[:10]).toordinal())
            except ValueError:
                return None
    return None if value is None or isinstance(value, bool) else float(value)


def form(text: str) -> str:
    """How an id, date or amount is written: its digits are zeros, a zero for any number of them."""
    return re.sub(r"\d+", "0", text)


def whole(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){re.escape(text)}(?![\w-])")


def exchange(value: Any, exchanged: Mapping[str, Scalar]) -> Any:
    """The value with every old value in it replaced by its new one, in texts too."""
    if isinstance(value, Mapping):
        return {key: exchange(inner, exchanged) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [exchange(inner, exchanged) for inner in value]
    if isinstance(value, str):
        old = sorted((text for text in exchanged if text and text in value), key=len, reverse=True)
        pattern = "|".join(whole(text).pattern for text in old)
        return re.sub(pattern, lambda match: text_of(exchanged[match[0]]), value) if old else value
    new = exchanged.get(text_of(value), value) if not isinstance(value, bool | None) else value
    number = number_of(new) if isinstance(new, str) else None  # a word of an answer, where the argument is a number
    return new if number is None else int(number) if number.is_integer() else number


def without_values(play: Play) -> str:
    """A final answer without all that its trace's calls and answers hold."""
    return str(exchange(play.said, {text: "" for place, value in play.values() if (text := text_of(value))}))


def paired_values(
    seed: Play, slots: Mapping[str, Sequence[Place]], success: Play, own: Mapping[str, Sequence[Place]]
) -> dict[str, str] | None:
    """For each value of one request the value in its place in the other, in the order of the texts; None if they differ."""
    first, second = _in_order(seed, slots), _in_order(success, own)
    if len(first) != len(second):
        return None
    paired = dict(zip(first, second, strict=True))
    return paired if all(_meet(one, slots[one], other, own[other]) for one, other in paired.items()) else None


def masked_request(play: Play, slots: Mapping[str, Sequence[Place]]) -> str:
    """The request without its values; what stands nowhere but in its metadata may say what is asked, and stays."""
    values = [text for text, places in slots.items() if any(place[0] != "metadata" for place in places)]
    return str(exchange(first_observation(play.task), dict.fromkeys(values, "")))


def asked_for(play: Play, worded: frozenset[str]) -> frozenset[str]:
    """What a request asks for: its intent, where the trace has one, else its words."""
    intent = play.task.metadata.get(INTENT)
    return frozenset({f"{INTENT}={intent}"}) if intent else worded  # an empty one says nothing


def intents_problem(tasks: Sequence[Task]) -> str | None:
    """Why the intents of recorded tasks tell little, in a sentence; None where they do, and where there are none."""
    intents = Counter(str(task.metadata.get(INTENT) or "") for task in tasks)
    if without := intents.pop("", 0):
        rest = "those requests are not known to ask for what others do; give it to all rows or to none"
        return f'{without} of {len(tasks)} training traces have no metadata["{INTENT}"]: {rest}' if intents else None
    if 2 * len(intents) > len(tasks) > 1:
        what = 'say what is asked for ("refund"), not which request it is, or leave it out'
        return f'metadata["{INTENT}"] has {len(intents)} values in {len(tasks)} training traces, hardly two share one: {what}'
    return None


def is_request(text: str, request: str) -> bool:
    """Whether a value is the request, or most of it: its sentences, not something named in it."""
    return len(text.split()) > 3 and 2 * len(text) > len(request)


def with_stale_values(
    requests: Sequence[tuple[Play, frozenset[str]]], slots: Callable[[Play], Mapping[str, Sequence[Place]]]
) -> set[int]:
    """Plays (by `id`) whose request holds a value that nobody looked up there, and that lookups answer for the same words.

    The name beside a customer's id would stay where the id is exchanged.

    Args: `requests`, with their words, without values and names; `slots`, the values of a request.
    """
    patterns: dict[frozenset[str], Counter[str]] = defaultdict(Counter)
    for play, worded in requests:
        patterns[worded][_as_pattern(play, slots(play))] += 1

    def keeps(play: Play, worded: frozenset[str]) -> bool:
        usual = [text for text, number in patterns[worded].items() if number >= _USUAL * patterns[worded].total()]
        matches = (re.fullmatch(text, first_observation(play.task), re.DOTALL) for text in usual)
        return any(group not in slots(play) for match in matches if match for group in match.groups())

    return {id(play) for play, worded in requests if keeps(play, worded)}


def _meet(text: str, places: Sequence[Place], other: str, others: Sequence[Place]) -> bool:
    """Whether two values stand in the same place of their traces, or are ids, dates or amounts that are written alike."""
    shared = {*places} & {*others}
    if any(place[0] != "metadata" for place in shared):
        return True
    return form(text) == form(other) if "0" in form(text) + form(other) else bool(shared)


def _in_order(play: Play, slots: Mapping[str, Sequence[Place]]) -> list[str]:
    request = first_observation(play.task)
    return sorted(slots, key=lambda text: found.start() if (found := whole(text).search(request)) else 0)


def _as_pattern(play: Play, slots: Mapping[str, Sequence[Place]]) -> str:
    """The request as a regular expression: values and numbers match any others; what only lookups answered is a group."""
    values = [whole(text).pattern for text in sorted(slots, key=len, reverse=True)]
    parts = re.split(f"({'|'.join([*values, _NUMBER])})", first_observation(play.task))
    answered = {text for text, places in slots.items() if {place[0] for place in places} <= {"answer", "metadata"}}
    found = list[str]()
    for at, part in enumerate(parts):
        other = "(?:.+?)" if re.search(r"\s", part) else r"\S+"  # few that match anything: they are tried in every way
        found.append(re.escape(part) if at % 2 == 0 else "(.+?)" if part in answered else other)
    return "".join(found)
