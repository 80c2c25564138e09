"""The cases that recorded successes were right in: what their lookups were answered."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from dreamgym_lg.curriculum.plays import Place, Play, Scalar, number_of, text_of, unnumbered

Kind = tuple[tuple[str, ...], ...]
"""Of each call the tool, and those arguments that are no values of a request of its own, such as a reason."""

_EMPTY: Mapping[str, Scalar] = {"": None}
_FLAG = 6
"""Most values of a place, in all traces, that make it a condition whatever they are."""


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

    A place where these have few values (a status, a tier) is a *condition*. All conditions have the values of one of the
    successes, or every two of them those of one: what is done may depend on any two conditions, and with more of them the
    traces do not hold every combination. An amount or date is between those of the successes with the same conditions.
    Anything else (an id, a name) may be new.

    Args:
        counts: How often each value stands in each place, in all traces.
    """

    def __init__(self, counts: Mapping[Place, Mapping[str, int]]) -> None:
        self._flags = {place for place, found in counts.items() if len(found) <= _FLAG}

    def seen(self, successes: Sequence[Success], found: Mapping[Place, Scalar]) -> bool:
        """Whether these successes have been in the case that the values `found` make."""
        conditions = self._conditions(successes, found)
        if alike := _with(successes, conditions.items()):
            return _between(alike, found)
        with_each = {place: _with(successes, [(place, text)]) for place, text in conditions.items()}
        pairs = permutations(conditions, 2)
        return (
            len(conditions) > 2
            and all(_between(alike, found) for alike in with_each.values())
            and all(_with(with_each[first], [(second, conditions[second])]) for first, second in pairs)
        )

    def alike(self, successes: Sequence[Success], found: Mapping[Place, Scalar]) -> Sequence[Success]:
        """Those of the successes that have been in the case, numbers aside; all where none has been in the whole of it."""
        return _with(successes, self._conditions(successes, found).items()) or successes

    def _conditions(self, successes: Sequence[Success], found: Mapping[Place, Scalar]) -> dict[Place, str]:
        seen = {place: set[str]().union(*(each.values.get(place, _EMPTY) for each in successes)) for place in found}
        return {
            place: text_of(found[place])
            for place, texts in seen.items()
            if unnumbered(place) in self._flags or len(texts) ** 2 <= len(successes)
        }


def _with(successes: Sequence[Success], conditions: Iterable[tuple[Place, str]]) -> list[Success]:
    wanted = list(conditions)
    return [each for each in successes if all(each.has(place, text) for place, text in wanted)]


def _between(successes: Sequence[Success], found: Mapping[Place, Scalar]) -> bool:
    """Whether each amount and date is between those of the successes."""
    for place, value in found.items():
        if (number := number_of(value)) is not None:
            known = [size for each in successes for text in each.values.get(place, ()) if (size := number_of(text)) is not None]
            if not known or not min(known) <= number <= max(known):
                return False
    return bool(successes)
