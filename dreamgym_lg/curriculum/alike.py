"""Which recorded requests ask for the same: by their words, else by what was done for them."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product

from dreamgym_lg.curriculum.cases import Cases, Kind, Success
from dreamgym_lg.curriculum.plays import Place, Play, unnumbered, without_values
from dreamgym_lg.curriculum.task_generator import Overlap

Words = frozenset[str]
"""Of a request, without its values and names."""
Group = frozenset[Words]
"""Requests that ask for the same."""
Deed = tuple[Kind, str]
"""The calls of a success and, where none of them writes, its answer without its values."""

_ALIKE, _NEAR = 0.6, 0.4
"""`Overlap` of two requests, their values aside, from which they ask alike, and from which they may: what one success wrote is
carried over to the former, and what another wrote instead forbids it from the latter on."""
_COMPARED = 40
"""Successes of a group that are compared with those of another."""
_GROUPED = 300
"""Different requests that are put into groups by what was done."""
_DEEDS = 2
"""Different deeds that two groups must have in common to ask for the same."""


class AlikeRequests:
    """Groups of recorded requests that ask for the same.

    Requests that share most of their words (`Overlap`) ask for the same. So do two groups of requests in other words ("send it
    to Bonn", "I have moved to Bonn") whose successes made the same calls whenever their lookups returned the same, and in at
    least `_DEEDS` different ways, with the same answer where nothing was written. Requests whose successes made different
    calls in the same case never do, whatever their words.

    Args:
        requests: The words of each request, without values and names; successes and failures.
        writes: Whether a tool, by name, changes the world.
    """

    def __init__(
        self,
        requests: Sequence[tuple[Play, Words]],
        successes: Sequence[Success],
        cases: Cases,
        *,
        writes: Callable[[str], bool],
    ) -> None:
        self._requests, self._successes, self._cases, self._writes = requests, successes, cases, writes
        self._overlap = Overlap(" ".join(words) for _, words in requests)
        self._found: dict[tuple[Words, float], list[Success]] = {}
        self._nearest: dict[Words, Group] = {}
        self._done: dict[Group, list[tuple[dict[Place, frozenset[str]], Deed]]] = {}

    def successes(self, request: Words, *, near: bool = False) -> list[Success]:
        """The successes whose requests ask for the same, without lucky ones: those that looked up less than most successes
        whose lookups returned the same. Args: `near`, also those that may ask for the same."""
        least = _NEAR if near else _ALIKE
        if (request, least) not in self._found:
            group = self._same(request)
            same = {request, *group}
            wide = [each for each in self._successes if each.request in same or self._overlap(request, each.request) >= least]
            # those in nearly the same words who contradicted each other ("cancel", "return") are in groups of their own
            self._found[request, least] = [each for each in self._careful(wide) if near or not group or each.request in same]
        return self._found[request, least]

    def worded(self, request: Words) -> list[Play]:
        """All plays, of whatever outcome, whose requests ask for the same."""
        group = self._same(request)

        def asks_alike(other: Words) -> bool:
            return self._same(other) == group and (bool(group) or self._overlap(request, other) >= _ALIKE)

        return [play for play, each in self._requests if each == request or asks_alike(each)]

    def _same(self, request: Words) -> Group:
        """The group that holds this request, else the one that holds the most similar; empty if none is similar."""
        if request not in self._nearest:
            near = {group: max(self._overlap(request, other) for other in group) for group in self._groups}
            best = max(near, key=near.__getitem__, default=Group())
            self._nearest[request] = best if near.get(best, 0) >= _ALIKE else Group()
        return self._nearest[request]

    @cached_property
    def _groups(self) -> list[Group]:
        """The requests of the successes, in groups that ask for the same."""

        def same_words(first: Group, second: Group) -> bool:
            alike = any(self._overlap(one, other) >= _ALIKE for one, other in product(first, second))
            return alike and self._agreed(first, second) >= 0

        requests = [*dict.fromkeys(success.request for success in self._successes)][:_GROUPED]
        groups = _merged([Group({request}) for request in requests], same_words)
        return _merged(groups, lambda first, second: self._agreed(first, second) >= _DEEDS)

    def _agreed(self, first: Group, second: Group) -> int:
        """How many different deeds two groups share where their lookups returned the same; -1 if the calls differ there."""
        agreed = set[Deed]()
        for (one, deed), (other, its) in product(self._deeds(first), self._deeds(second)):
            if (shared := one.keys() & other.keys()) and all(one[place] == other[place] for place in shared):
                if deed[0] != its[0]:
                    return -1
                if deed == its:  # an answer in other words says neither that they ask for the same nor that they do not
                    agreed.add(deed)
        return len(agreed)

    def _deeds(self, group: Group) -> list[tuple[dict[Place, frozenset[str]], Deed]]:
        """What the careful successes of a group were told, and what they did."""
        if group not in self._done:
            some = [each for each in self._successes if each.request in group][:_COMPARED]
            self._done[group] = [(self._told(each), self._deed(each)) for each in self._careful(some)]
        return self._done[group]

    def _told(self, success: Success) -> dict[Place, frozenset[str]]:
        """What it looked up, where few values are possible."""
        return {
            place: frozenset(texts)
            for place, texts in success.values.items()
            if place[0] == "answer" and self._cases.is_flag(place) and not self._writes(unnumbered(place)[1])
        }

    def _deed(self, success: Success) -> Deed:
        return success.kind, "" if success.writes else without_values(success.play)

    def _careful(self, alike: Sequence[Success]) -> list[Success]:
        cases, usual, careful = self._cases.among(alike), dict[frozenset[tuple[Place, str]], set[str]](), list[Success]()
        for each in alike:
            told = {place: next(iter(texts.values())) for place, texts in each.values.items() if place[0] == "answer"}
            read = {place: value for place, value in told.items() if not self._writes(unnumbered(place)[1])}
            case = frozenset(cases.conditions(read).items())
            if case not in usual:
                usual[case] = self._usual(cases.alike(alike, read))
            if usual[case].issubset(each.play.tools):
                careful.append(each)
        return careful

    def _usual(self, successes: Sequence[Success]) -> set[str]:
        """The tools that most of the successes used to look up."""
        looked_up = Counter(tool for each in successes for tool in {*each.play.tools} if not self._writes(tool))
        return {tool for tool, number in looked_up.items() if 2 * number > len(successes)}


def _merged(groups: Sequence[Group], same: Callable[[Group, Group], bool]) -> list[Group]:
    """The groups, those that ask for the same put together, from the largest on."""
    merged = list[Group]()
    for group in sorted(groups, key=len, reverse=True):
        own = next((each for each in merged if same(each, group)), Group())
        merged = [*(each for each in merged if each != own), own | group]
    return merged if len(merged) == len(groups) else _merged(merged, same)
