"""The traces whose values a variation gets: one for all values that a lookup ties together, others for the rest."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import cycle, islice
from random import Random
from typing import NamedTuple

from dreamgym_lg.curriculum.plays import Place, Play, Scalar, by_place, is_empty, leaves, text_of, unnumbered

_TRIED = 100
"""Most traces whose values are tried for one variation."""

Values = Mapping[Place, Mapping[str, Scalar]]
"""As `by_place`."""


class Offer(NamedTuple):
    """Values for a request, from one trace or several."""

    traces: Sequence[Play]
    values: Mapping[str, Values]
    """For each value of the request all those of the trace that it is exchanged with one of."""


class Donors:
    """Draws the traces whose values a recorded request gets.

    Two of its values come from one trace where a lookup ties them: it was made with both, one was answered for the other, or
    what was answered for both has a value in common (the customer's id in the order). What is not tied may come from different
    traces: another customer with another car, on another date. So three traces make more than three cases.

    Args:
        writes: Whether a tool, by name, changes the world.
        categorical: Places of few values, unnumbered: having one in common ties nothing.
    """

    def __init__(self, plays: Sequence[Play], *, writes: Callable[[str], bool], categorical: Collection[Place]) -> None:
        self._plays = [(play, by_place(play)) for play in plays]
        self._writes, self._categorical = writes, categorical

    def __len__(self) -> int:
        return len(self._plays)

    def draw(self, success: Play, slots: Mapping[str, Sequence[Place]], rng: Random) -> Iterator[Offer]:
        """Offers for the values of a success's request, each with the places where it stands in its trace; none twice."""
        groups = self._tied(success, slots)
        drawn = list[Sequence[tuple[Play, Values]]]()
        for group in groups:
            places = [slots[text] for text in group]
            able = [each for each in self._plays if all(not each[1].keys().isdisjoint(some) for some in places)]
            if not able:
                return
            drawn.append(rng.sample(able, min(_TRIED, len(able))))
        for chosen in islice(zip(*map(cycle, drawn), strict=True), max(map(len, drawn), default=0)):
            pairs = list(zip(groups, chosen, strict=True))
            yield Offer([play for play, _ in chosen], {text: values for group, (_, values) in pairs for text in group})

    def _tied(self, play: Play, slots: Collection[str]) -> list[list[str]]:
        """The values of the request, those that are tied in one list."""
        if play.facts():  # what else the task's world is, is one trace's
            return [[*slots]] if slots else []
        tied = [{text} for text in slots]
        for name, call, answer in zip(play.names(), play.calls, play.answers, strict=True):
            if self._writes(call.name):
                continue
            found = [*leaves(call.arguments, ("call", name)), *leaves(answer, ("answer", name))]
            told = {
                text_of(value) for place, value in found if unnumbered(place) not in self._categorical and not is_empty(value)
            }
            met = [each for each in tied if each & told]
            tied = [*(each for each in tied if not each & told), told.union(*met)]
        return [own for each in tied if (own := [text for text in slots if text in each])]
