"""From which recorded traces a variation takes its values: from one trace those that a call ties together."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import cycle, islice
from random import Random
from typing import NamedTuple

from dreamgym_lg.curriculum.plays import Place, Play, Values, by_place, is_empty, leaves, parsed_answer, text_of, unnumbered

_TRIED = 100
"""Most traces whose values are tried for the values of a request that are tied."""


class Offer(NamedTuple):
    """Values for a request, from one trace or several."""

    traces: Sequence[Play]
    values: Mapping[str, Values]
    """By value of the request: all that stand in the trace which replaces it."""


class Donors:
    """Chooses the recorded traces from which a recorded request gets new values.

    Two of its values come from one trace where a call ties them: it was made with both, one (or what holds it) was answered for
    the other, or what was answered for both has a value in common (the customer's id in the order). What is not tied may come
    from different traces: another customer with another car. So three traces make more than three cases. Where tasks have
    metadata that are facts of their worlds, all values are of one trace, as these are. Metadata of few values (a kind of
    request, a tier) are a label: traces with the same one are put together.

    Args:
        writes: Whether a tool, by name, changes the world: what it answers ties nothing, since nothing depends on it.
        categorical: Places of few values, unnumbered: having one in common ties nothing.
    """

    def __init__(self, plays: Sequence[Play], *, writes: Callable[[str], bool], categorical: Collection[Place]) -> None:
        self._plays = [(play, by_place(play)) for play in plays]
        self._writes, self._categorical = writes, categorical
        self._has_facts = any(place not in categorical for play in plays for place, _ in leaves(play.facts(), ("metadata",)))

    def __len__(self) -> int:
        return len(self._plays)

    def draw(
        self,
        slots: Mapping[str, Sequence[Place]],
        successes: Sequence[tuple[Play, Mapping[str, str]]],
        rng: Random,
        *,
        label: Play,
    ) -> Iterator[Offer]:
        """Offers for the values of a success's request, each with the places where it stands in its trace; none twice.

        Args:
            successes: This one and others of such requests, each with this one's value for each value of its request. What is
                tied in one of them is tied.
            label: The trace whose metadata the variation gets.
        """
        groups = [[*slots]] if self._has_facts else self._groups(slots, successes)
        drawn = list[Sequence[tuple[Play, Values]]]()
        for group in groups:
            places = [slots[text] for text in group]
            able = [each for each in self._plays if all(not each[1].keys().isdisjoint(some) for some in places)]
            if len(groups) > 1:
                able = [each for each in able if each[0].facts() == label.facts()]
            if not able:
                return
            drawn.append(rng.sample(able, min(_TRIED, len(able))))
        for chosen in islice(zip(*map(cycle, drawn), strict=True), max(map(len, drawn), default=0)):
            pairs = list(zip(groups, chosen, strict=True))
            yield Offer([play for play, _ in chosen], {text: values for group, (_, values) in pairs for text in group})

    def _groups(self, slots: Collection[str], successes: Sequence[tuple[Play, Mapping[str, str]]]) -> list[list[str]]:
        """The values of the request, those that are tied in one list."""
        tied = [{text} for text in slots]
        for play, paired in successes:
            for together in self._ties(play, paired):
                tied = _merged(tied, {paired[text] for text in together & paired.keys()})
        return [[text for text in slots if text in each] for each in tied if each]

    def _ties(self, play: Play, slots: Collection[str]) -> list[set[str]]:
        """The values of a request and those of its trace's calls, in groups: what one call has, or calls that share a value."""
        tied = [{text} for text in slots]
        for name, call, text in zip(play.names(), play.calls, play.texts, strict=True):
            found = [*leaves(call.arguments, ("call", name))]
            if not self._writes(call.name):  # the whole answer, also what of a list was not gone on with
                found += leaves(parsed_answer(text), ("answer", name))
            told = {
                text_of(value) for place, value in found if unnumbered(place) not in self._categorical and not is_empty(value)
            }
            told |= {own for own in slots if any(_holds(each, own) or _holds(own, each) for each in told)}
            tied = _merged(tied, told)
        return tied


def _merged(groups: Sequence[set[str]], joined: set[str]) -> list[set[str]]:
    """The groups, all that share a text with `joined` made one with it."""
    met = [each for each in groups if each & joined]
    return [*(each for each in groups if not each & joined), joined.union(*met)]


def _holds(text: str, part: str) -> bool:
    """Whether a value is part of another: the date of "2026-04-10T13:30", the first name of "Ada Berg"."""
    return len(part) > 2 and part in text
