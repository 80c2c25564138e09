"""Which recorded requests ask for the same: by their words, else by what was done for them."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import chain, product

from dreamgym_lg.curriculum.cases import Cases, Done, Success, limited, telling_apart
from dreamgym_lg.curriculum.plays import Place, Play, exchange, text_of
from dreamgym_lg.curriculum.task_generator import Overlap, words

Words = frozenset[str]
"""What a request asks for: its words, without its values and names, or the intent that its trace says (`asked_for`)."""
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

_NEEDLESS = 5
"""Successes in one condition that all go without a lookup which most others made, to show that it is not needed there."""
_ANSWERED = 3
"""Successes of each of two groups, all with one and the same answer and no call that writes, that ask for the same."""
_NAMED = 0.1
"""Share of the requests up to which a word that never stands in lower case is taken for a name: who asks, not what is asked."""


class AlikeRequests:
    """Groups of recorded requests that ask for the same.

    Requests that share most of their words (`Overlap`) ask for the same. So do two groups of requests in other words ("send it
    to Bonn", "I have moved to Bonn") whose successes wrote the same whenever their lookups returned the same, and in at
    least `_DEEDS` different ways, with the same answer where nothing was written; and two to which nothing but one and the same
    answer was given. Requests whose successes wrote different things in the same case do not, whatever their words, unless one
    group alone shows why (`_is_explained`).

    Args:
        requests: The words of each request, without values and names; successes and failures.
        failures: What failed, as successes: calls that also failed in a case were right by luck.
        writes: Whether a tool, by name, changes the world.
    """

    def __init__(
        self,
        requests: Sequence[tuple[Play, Words]],
        successes: Sequence[Success],
        cases: Cases,
        *,
        writes: Callable[[str], bool],
        failures: Sequence[Success] = (),
    ) -> None:
        self._requests, self._cases, self._writes = requests, cases, writes
        self._successes, self._failures = successes, failures
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
            return alike and not self._contradict(first, second)

        def same_deeds(first: Group, second: Group) -> bool:
            return not self._contradict(first, second, explained=True) and self._shared(first, second) >= _DEEDS

        requests = [*dict.fromkeys(success.request for success in self._successes)][:_GROUPED]
        groups = _merged([Group({request}) for request in requests], same_words)
        return _merged(groups, lambda first, second: self._answered(first, second) or same_deeds(first, second))

    def _answered(self, first: Group, second: Group) -> bool:
        """Whether nothing but one and the same answer was ever given to both."""
        both = self._deeds(first), self._deeds(second)
        answers = {(each.deed, _masked_answer(each.success.play)) for each in chain(*both)}
        if len(answers) != 1 or not all(text for (_, text), _ in answers) or min(map(len, both)) < _ANSWERED:
            return False
        # what was always so for one of them may be why the answer was the same
        places = {place for each in chain(*both) for place in each.told}
        told = ([{each.told.get(place) for each in some} for some in both] for place in places)
        return all(one == other or min(len(one), len(other)) > 1 for one, other in told)

    def _contradict(self, first: Group, second: Group, *, explained: bool = False) -> bool:
        """Whether something else was done for two groups where all answers are the same.

        Args: `explained`, not if each such pair `_is_explained`.
        """
        one, other = self._deeds(first), self._deeds(second)
        told = ((each, its) for each, its in product(one, other) if each.told.keys() & its.told.keys())
        pairs = ((each, its) for each, its in told if each.deed[0] != its.deed[0] and each.in_case_of(its, each.told))
        return any(not (explained and self._is_explained(pair, one, other)) for pair in pairs)

    def _is_explained(self, pair: tuple[Done, Done], one: Sequence[Done], other: Sequence[Done]) -> bool:
        """Whether one group alone did both, and a limit tells them apart, or looked up both in this case: by luck in one."""
        first, second = pair
        limit = limited([*one, *other], first, second)
        looked_up = {self._looked_up(each) for each in pair}
        for some in (one, other):
            here = {self._looked_up(each) for each in some if each.in_case_of(first, first.told)}
            did_both = {first.deed, second.deed} <= {each.deed for each in some}
            if (limit and did_both) or (len(looked_up) > 1 and looked_up <= here):
                return True
        return False

    def _looked_up(self, done: Done) -> frozenset[str]:
        return frozenset(name for name in done.success.play.tools if not self._writes(name))

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
        """The outcomes of the group's successes, and in which case. Lucky ones wrote what is right, too."""
        if group not in self._done:
            some = [each for each in self._successes if each.request in group][:_COMPARED]
            self._done[group] = [Done(self._cases.conditions(each.answers), each.outcome, each) for each in some]
        return self._done[group]

    def _careful(self, alike: Sequence[Success]) -> list[Success]:
        """Without those that were right by luck."""
        cases = self._cases.among(alike, [[each.outcome for each in alike]])
        requests = {each.request for each in alike}
        failures = [each for each in self._failures if each.request in requests]
        lucky, careful = dict[Hashable, bool](), list[Success]()
        for each in alike:
            case = each.kind, frozenset(cases.conditions(each.answers).items())
            if case not in lucky:
                lucky[case] = self._is_lucky(each, alike, failures, cases)
            careful += [] if lucky[case] else [each]
        return careful

    def _is_lucky(self, success: Success, alike: Sequence[Success], failures: Sequence[Success], cases: Cases) -> bool:
        """Whether most others in the case looked up more, or the same calls failed there and more careful ones did not."""
        conditions, others = cases.conditions(success.answers), cases.met(alike, success.answers)
        same = [other for other in others if all(other.has(*condition) for condition in conditions.items())]
        usual = self._usual(others) | (self._usual(same) if len(same) >= _NEEDLESS else set())
        skipped = usual.difference(success.play.names())
        needless = all(_needless(name, conditions, alike) for name in skipped)
        return not needless or self._failed(success, others, cases.met(failures, success.answers))

    def _failed(self, success: Success, others: Sequence[Success], failures: Sequence[Success]) -> bool:
        """Whether the same calls failed, and those of another with this outcome, who looked up more, did not: in its case."""
        failed, own = {each.kind for each in failures}, {*success.play.names()}
        if success.kind not in failed:
            return False
        more = (each for each in others if each.kind not in failed and {*each.play.names()} > own)
        return any(each.outcome == success.outcome for each in more)

    def _usual(self, successes: Sequence[Success]) -> set[str]:
        """The lookups that most of the successes made: the tools, and `TOOL 2` where it was asked twice."""
        named = (pair for each in successes for pair in zip(each.play.names(), each.play.tools, strict=True))
        looked_up = Counter(name for name, tool in named if not self._writes(tool))
        return {name for name, number in looked_up.items() if 2 * number > len(successes)}


def _masked_answer(play: Play) -> str:
    """The final answer, each value in it by where it stands."""
    places = {text_of(value): "/".join(place) for place, value in reversed([*play.values()]) if text_of(value)}
    return str(exchange(play.said, places))


def _needless(lookup: str, conditions: Mapping[Place, str], successes: Sequence[Success]) -> bool:
    """Whether enough successes had one of these conditions, and none of them made the lookup: a gold customer's refund."""
    met = ([each for each in successes if each.has(*condition)] for condition in conditions.items())
    return any(len(some) >= _NEEDLESS and not any(lookup in each.play.names() for each in some) for some in met)


def _deciding(first: Sequence[Done], second: Sequence[Done]) -> frozenset[Place] | None:
    """The conditions that tell apart what both did, where these are no more than tell apart what one of them did; else None."""
    if not (found := telling_apart([*first, *second])):
        return None
    alone = max((len(own[0]) for own in map(telling_apart, (first, second)) if own), default=0)  # else too few for a limit
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
