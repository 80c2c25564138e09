"""Which recorded requests ask for the same: by their words, else by what was done for them."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product

from dreamgym_lg.curriculum.cases import Cases, Done, Success, telling_apart
from dreamgym_lg.curriculum.plays import Place, Play
from dreamgym_lg.curriculum.task_generator import Overlap, words

Words = frozenset[str]
"""Of a request, without its values and names."""
Group = frozenset[Words]
"""Requests that ask for the same."""
_ALIKE, _NEAR = 0.6, 0.4
"""`Overlap` of two requests, their values aside, from which they ask alike, and from which they may: what one success wrote is
carried over to the former, and what another wrote instead forbids it from the latter on, unless the two are known to ask for
different things."""
_COMPARED = 40
"""Successes of a group that are compared with those of another."""
_GROUPED = 300
"""Different requests that are put into groups by what was done."""
_DEEDS = 2
"""Different deeds that two groups must have in common to ask for the same."""

_NAMED = 0.1
"""Share of the requests up to which a word that never stands in lower case is taken for a name: who asks, not what is asked."""


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
        self._differing: dict[frozenset[Group], bool] = {}
        self._done: dict[Group, list[Done]] = {}

    def successes(self, request: Words, *, near: bool = False) -> list[Success]:
        """The successes whose requests ask for the same, without lucky ones: those that looked up less than most successes
        whose lookups returned the same. Args: `near`, also those that may ask for the same: in similar words, and nothing else
        was done for them in the same case."""
        least = _NEAR if near else _ALIKE
        if (request, least) not in self._found:
            group = self._same(request)
            same = {request, *group}
            wide = [each for each in self._successes if each.request in same or self._overlap(request, each.request) >= least]
            # those in nearly the same words who contradicted each other ("cancel", "return") are in groups of their own
            self._found[request, least] = [
                each
                for each in self._careful(wide)
                if not group or each.request in same or (near and not self._ask_otherwise(group, self._same(each.request)))
            ]
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
        """How many different deeds two groups share in the same case; -1 if the calls differ where all answers are the same."""
        return -1 if self._contradict(first, second) else self._shared(first, second)

    def _contradict(self, first: Group, second: Group) -> bool:
        told = (
            (each, its) for each, its in product(self._deeds(first), self._deeds(second)) if each.told.keys() & its.told.keys()
        )
        return any(each.deed[0] != its.deed[0] and each.in_case_of(its, each.told) for each, its in told)

    def _shared(self, first: Group, second: Group) -> int:
        one, other = self._deeds(first), self._deeds(second)
        deciding = _deciding(one, other)
        # an answer in other words says neither that they ask for the same nor that they do not
        same = (
            (each, its) for each, its in product(one, other) if each.deed == its.deed and each.told.keys() & its.told.keys()
        )
        return len({each.deed for each, its in same if each.in_case_of(its, each.told if deciding is None else deciding)})

    def _ask_otherwise(self, first: Group, second: Group) -> bool:
        """Whether two groups are known to ask for different things: something else was done in a case, and little was alike."""
        pair = frozenset({first, second})
        if pair not in self._differing:
            differ = first != second and self._contradict(first, second)
            self._differing[pair] = differ and self._shared(first, second) < _DEEDS
        return self._differing[pair]

    def _deeds(self, group: Group) -> list[Done]:
        """What the careful successes of a group did, and in which case."""
        if group not in self._done:
            some = [each for each in self._successes if each.request in group][:_COMPARED]
            self._done[group] = [Done(self._cases.conditions(each.answers), each.deed) for each in self._careful(some)]
        return self._done[group]

    def _careful(self, alike: Sequence[Success]) -> list[Success]:
        cases, usual, careful = self._cases.among(alike), dict[frozenset[tuple[Place, str]], set[str]](), list[Success]()
        for each in alike:
            case = frozenset(cases.conditions(each.answers).items())
            if case not in usual:
                usual[case] = self._usual(cases.alike(alike, each.answers))
            if usual[case].issubset(each.play.names()):
                careful.append(each)
        return careful

    def _usual(self, successes: Sequence[Success]) -> set[str]:
        """The lookups that most of the successes made: the tools, and `TOOL 2` where it was asked twice."""
        named = (pair for each in successes for pair in zip(each.play.names(), each.play.tools, strict=True))
        looked_up = Counter(name for name, tool in named if not self._writes(tool))
        return {name for name, number in looked_up.items() if 2 * number > len(successes)}


def _deciding(first: Sequence[Done], second: Sequence[Done]) -> frozenset[Place] | None:
    """The conditions that tell apart what both did, where these are no more than tell apart what one of them did; else None."""
    if not (found := telling_apart([*first, *second])):
        return None
    alone = max(len(telling_apart(each)[0]) for each in (first, second))
    return frozenset[Place]().union(*found) if len(found[0]) <= alone else None


def _merged(groups: Sequence[Group], same: Callable[[Group, Group], bool]) -> list[Group]:
    """The groups, those that ask for the same put together, from the largest on."""
    merged = list[Group]()
    for group in sorted(groups, key=len, reverse=True):
        own = next((each for each in merged if same(each, group)), Group())
        merged = [*(each for each in merged if each != own), own | group]
    return merged if len(merged) == len(groups) else _merged(merged, same)


def names_among(requests: Sequence[str]) -> Words:
    """The words that are always capitalised and stand in few requests: names of people and things. Returned in lower case."""
    lower = {word for request in requests for word in re.findall(r"(?<!\w)[^\W\d_A-Z][\w-]*", request)}
    counts = Counter(word for request in requests for word in words(request))
    return frozenset(word for word, number in counts.items() if word not in lower and number <= _NAMED * len(requests))
