"""The cases that recorded successes were right in: what their lookups were answered."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple

from dreamgym_lg.curriculum.plays import Place, Play, Scalar, number_of, text_of, unnumbered

Kind = tuple[tuple[str, ...], ...]
"""Of each call the tool, and those arguments that are no values of a request of its own, such as a reason."""

_EMPTY: Mapping[str, Scalar] = {"": None}
_FLAG = 6
"""Most values of a place, in all traces, that make it a condition whatever they are."""


_CHANCE = 0.05
"""How probable it may be at most that numbers drawn at random lie apart, for numbers that do to show a limit."""


class Success(NamedTuple):
    """What a recorded success says of the cases in which its calls are right."""

    play: Play
    request: frozenset[str]
    """Its words, without its values and names."""
    kind: Kind
    writes: Kind
    """Of its calls that write, as `kind`."""
    values: Mapping[Place, Mapping[str, Scalar]]

    def has(self, place: Place, text: str) -> bool:
        """Whether this value stands there."""
        return text in self.values.get(place, _EMPTY)


class Cases:
    """Whether new answers make a case that successes with the same calls have been in.

    A place where few values stand (a status, a tier) is a *condition*. A case has been seen if one success had the values of
    all conditions, or if for each pair of conditions some success had both values: what is done may depend on two conditions
    at once, and the traces do not hold every combination of more. Each amount and date has to be between those of the
    successes with the same conditions. Anything else (an id, a name) may be new.

    Args:
        counts: How often each value stands in each place, in all traces.
        group: Successes whose requests ask alike, whatever was done: what has few values among them is a condition.
    """

    def __init__(self, counts: Mapping[Place, Mapping[str, int]], group: Sequence[Success] = ()) -> None:
        self._counts, self._group = counts, group
        self._few: dict[Place, bool] = {}

    def among(self, group: Sequence[Success]) -> "Cases":
        """The cases of requests that ask alike."""
        return Cases(self._counts, group)

    def is_flag(self, place: Place) -> bool:
        """Whether so few values stand there that it is a condition whatever they are."""
        return len(self._counts.get(unnumbered(place), ())) <= _FLAG

    def seen(self, successes: Sequence[Success], found: Mapping[Place, Scalar]) -> bool:
        """Whether these successes have been in the case that the values `found` make."""
        conditions = self.conditions(found)
        if alike := _with(successes, conditions.items()):
            return between(alike, found)
        with_each = {place: _with(successes, [(place, text)]) for place, text in conditions.items()}
        pairs = combinations(conditions, 2)
        return (
            len(conditions) > 2
            and all(between(alike, found) for alike in with_each.values())
            and all(_with(with_each[first], [(second, conditions[second])]) for first, second in pairs)
        )

    def contested(self, found: Mapping[Place, Scalar], own: Sequence[Success], others: Sequence[Success]) -> bool:
        """Whether a success of `others`, which wrote something else than `own`, had the same values wherever it looked.

        Not where all amounts or dates of `others` in a place are below or above all of `own`: then a limit decides.
        """
        conditions = self.conditions(found)
        told = ((each, {place: text for place, text in conditions.items() if place in each.values}) for each in others)
        agreeing = [each for each, shared in told if shared and all(each.has(place, text) for place, text in shared.items())]
        return bool(agreeing) and not _apart(own, agreeing, found) or self.seen(others, found)

    def alike(self, successes: Sequence[Success], found: Mapping[Place, Scalar]) -> Sequence[Success]:
        """Those of the successes that have been in the case, numbers aside; all where none has been in the whole of it."""
        return _with(successes, self.conditions(found).items()) or successes

    def conditions(self, found: Mapping[Place, Scalar]) -> dict[Place, str]:
        """Those of the values that stand where few do, as texts."""
        return {place: text_of(value) for place, value in found.items() if self.is_flag(place) or self._has_few(place)}

    def _has_few(self, place: Place) -> bool:
        if place not in self._few:
            texts = set[str]().union(*(each.values.get(place, _EMPTY) for each in self._group))
            self._few[place] = 0 < len(texts) ** 2 <= len(self._group)
        return self._few[place]


def _with(successes: Sequence[Success], conditions: Iterable[tuple[Place, str]]) -> list[Success]:
    wanted = list(conditions)
    return [each for each in successes if all(each.has(place, text) for place, text in wanted)]


def _numbers(successes: Sequence[Success], place: Place) -> list[float]:
    return [size for each in successes for text in each.values.get(place, ()) if (size := number_of(text)) is not None]


def _apart(first: Sequence[Success], second: Sequence[Success], found: Mapping[Place, Scalar]) -> bool:
    """Whether a limit tells them apart: in one of these places all numbers of the first are below or above those of the second,
    and there are too many for that to be chance."""
    places = [place for place, value in found.items() if number_of(value) is not None]
    for one, other in (({*_numbers(first, place)}, {*_numbers(second, place)}) for place in places):
        # of all ways to draw as many numbers from both together, two lie apart; each further place is another chance
        enough = 2 * len(places) <= _CHANCE * comb(len(one) + len(other), len(one))
        if enough and (max(one) < min(other) or max(other) < min(one)):
            return True
    return False


def between(successes: Sequence[Success], found: Mapping[Place, Scalar]) -> bool:
    """Whether each amount and date is between those of the successes."""
    for place, value in found.items():
        if (number := number_of(value)) is not None:
            known = _numbers(successes, place)
            if not known or not min(known) <= number <= max(known):
                return False
    return bool(successes)
