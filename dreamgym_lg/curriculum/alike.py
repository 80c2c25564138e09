"""Which recorded requests ask for the same: by their words, else by what was done for them."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, combinations, product
from math import lgamma, log

from dreamgym_lg.curriculum.cases import Cases, Deed, Done, Success, limited, telling_apart
from dreamgym_lg.curriculum.luck import careful
from dreamgym_lg.curriculum.plays import Place, Play, exchange, text_of
from dreamgym_lg.curriculum.task_generator import Overlap, words

Words = frozenset[str]
"""What a request asks for: its words, without its values and names, or the intent that its trace says (`asked_for`)."""
Group = frozenset[Words]
"""Requests that ask for the same."""
Groups = tuple[Group, ...]
"""A cluster in the making: groups that are put together."""
LogOdds = Callable[[Counter[Deed], Counter[Deed]], float]
_ALIKE, _NEAR = 0.6, 0.4
"""`Overlap` of two requests, their values aside, from which they ask alike, and from which they may: what one success wrote is
carried over to the former, and what another wrote instead forbids it from the latter on, unless the two are known to ask for
different things."""
_COMPARED = 40
"""Successes of a group that are compared with those of another."""
_GROUPED = 300
"""Different requests that are put into groups by what was done."""
_ODDS, _LIKELY = 10, 3
"""How many times as probable what was done for two groups has to be if they ask for the same as if they do not; and where
`_DEEDS` different deeds were done for both in the same cases."""
_DEEDS = 2
_NAMED = 0.1
"""Share of the requests up to which a word that never stands in lower case is taken for a name: who asks, not what is asked."""


class AlikeRequests:
    """Groups of recorded requests that ask for the same.

    Requests that share most of their words (`Overlap`) ask for the same. So do groups of requests in other words ("send it to
    Bonn", "I have moved to Bonn") for whose successes the same was done, so often, and so rarely for others, that it is no
    chance (`_log_odds`): the same calls that write, with arguments from the same places, or the same answer. Fewer successes
    do where two different things were done for both groups whenever their lookups returned the same. Requests whose successes
    wrote different things in the same case do not, whatever their words, unless one group alone shows why (`_is_explained`).

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
        self._against: dict[tuple[Group, Group], list[tuple[Done, Done]]] = {}
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
            requests = {each.request for each in wide}
            failures = [each for each in self._failures if each.request in requests]
            # those in nearly the same words who contradicted each other ("cancel", "return") are in groups of their own
            self._found[request, least] = [
                each
                for each in careful(wide, failures, self._cases, writes=self._writes)
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
            return alike and not self._contradictions(first, second)

        def same_deeds(first: Group, second: Group) -> bool:
            likely = odds(self._counts(first), self._counts(second)) >= log(_LIKELY)
            return likely and self._are_consistent((first, second)) and self._shared(first, second) >= _DEEDS

        requests = [*dict.fromkeys(success.request for success in self._successes)][:_GROUPED]
        groups = _merged([Group({request}) for request in requests], same_words)
        deeds = {group: self._counts(group) for group in groups}
        odds, found = _log_odds(Counter(chain(*deeds.values()))), list[Groups]()
        for each in _clusters(deeds, odds):
            own = {group: deeds[group] for group in each}
            found += [each] if self._are_consistent(each) else _clusters(own, odds, self._are_consistent)
        merged = _merged([Group().union(*each) for each in found], same_deeds)
        return [part for each in merged for part in self._unambiguous(each, groups, merged)]

    def _unambiguous(self, group: Group, parts: Sequence[Group], groups: Sequence[Group]) -> list[Group]:
        """The group, and apart from it each part that may as well belong to another group, which asks for something else:
        nothing was done for the part that was not also done for the other group."""

        def may_be_elsewhere(part: Group) -> bool:
            rivals = (each for each in groups if each != group and self._counts(part).keys() <= self._counts(each).keys())
            return any(not self._are_consistent((group - part, each)) for each in rivals)

        apart = [part for part in parts if part < group and may_be_elsewhere(part)]
        return [each for each in (group.difference(*apart), *apart) if each]

    def _are_consistent(self, groups: Sequence[Group]) -> bool:
        """Whether nothing speaks against these groups asking for the same: what contradicts in two of them is explained."""
        deeds = [self._deeds(group) for group in groups]
        pairs = chain(*(self._contradictions(*two) for two in combinations(groups, 2)))
        return all(_is_explained(pair, deeds, self._looked_up) for pair in pairs)

    def _contradictions(self, first: Group, second: Group) -> list[tuple[Done, Done]]:
        """Pairs of a success of each group whose lookups returned the same and whose calls differ."""
        if (first, second) not in self._against:
            told = (pair for pair in product(self._deeds(first), self._deeds(second)) if pair[0].deed[0] != pair[1].deed[0])
            self._against[first, second] = [
                (one, other) for one, other in told if one.told.keys() & other.told.keys() and one.in_case_of(other, one.told)
            ]
        return self._against[first, second]

    def _looked_up(self, done: Done) -> frozenset[str]:
        return frozenset(name for name in done.success.play.tools if not self._writes(name))

    def _written(self, success: Success) -> frozenset[str]:
        return frozenset(name for name in success.play.tools if self._writes(name))

    def _shared(self, first: Group, second: Group) -> int:
        """How many different deeds the two have in common, each done in the same case."""
        one, other = self._deeds(first), self._deeds(second)
        deciding = _deciding(one, other)
        same = (
            (each, its) for each, its in product(one, other) if each.deed == its.deed and each.told.keys() & its.told.keys()
        )
        return len({each.deed for each, its in same if each.in_case_of(its, each.told if deciding is None else deciding)})

    def _ask_otherwise(self, first: Group, second: Group) -> bool:
        """Whether two groups are known to ask for different things: something else was done in a case, and little was alike."""
        return first != second and bool(self._contradictions(first, second)) and self._shared(first, second) < _DEEDS

    def _deeds(self, group: Group) -> list[Done]:
        """The outcomes of the group's successes, and in which case. Lucky ones wrote what is right, too."""
        if group not in self._done:
            some = [each for each in self._successes if each.request in group][:_COMPARED]
            self._done[group] = [Done(self._cases.conditions(each.answers), _outcome(each), each) for each in some]
        return self._done[group]

    def _counts(self, group: Group) -> Counter[Deed]:
        """What was done for the group, how often; of what may have been right by luck, nothing."""
        return Counter(done.deed for done in self._deeds(group) if not self._may_be_luck(done))

    def _may_be_luck(self, done: Done) -> bool:
        """Whether somebody wrote with the same tools, or answered the same, after more lookups."""
        key = self._written(done.success), done.deed[1]
        return any(self._looked_up(done) < more for more in self._looked_up_before[key])

    @cached_property
    def _looked_up_before(self) -> Mapping[Hashable, set[frozenset[str]]]:
        """By the tools that wrote, or by the answer: the sets of lookups that successes made before."""
        found: dict[Hashable, set[frozenset[str]]] = defaultdict(set)
        for request in {each.request for each in self._successes}:
            for done in self._deeds(Group({request})):
                found[self._written(done.success), done.deed[1]].add(self._looked_up(done))
        return found


def _outcome(success: Success) -> Deed:
    """What was done, the values in an answer by where they stand: a plan and a currency are not told alike."""
    calls, answer = success.outcome
    return calls, _masked_answer(success.play) if answer else ""


def _masked_answer(play: Play) -> str:
    """The final answer, each value in it by where it stands."""
    places = {text_of(value): "/".join(place) for place, value in reversed([*play.values()]) if text_of(value)}
    return str(exchange(play.said, places))


def _is_explained(
    pair: tuple[Done, Done], groups: Sequence[Sequence[Done]], looked_up: Callable[[Done], frozenset[str]]
) -> bool:
    """Whether one group alone did both, and a limit tells them apart, or looked up both in this case: by luck in one."""
    first, second = pair
    both = {*map(looked_up, pair)}
    here = ({looked_up(each) for each in some if each.in_case_of(first, first.told)} for some in groups)
    if len(both) > 1 and any(both <= found for found in here):
        return True
    did_both = any({first.deed, second.deed} <= {each.deed for each in some} for some in groups)
    return did_both and limited([*chain(*groups)], first, second)


def _log_odds(usual: Mapping[Deed, int]) -> LogOdds:
    """The logarithm of how many times as probable what was done for two groups is if they ask for the same as if they do not.

    Who asks for the same draws what is done from one distribution, which has a Dirichlet prior around what is usual. So a deed
    that many requests have in common ("I have passed it on") says little, and a rare one much.

    Args: `usual`, for how many requests in other words each deed was done.
    """
    total = sum(usual.values())

    def likelihood(done: Counter[Deed]) -> float:
        drawn = ((usual[deed] / total, number) for deed, number in done.items())
        return sum(lgamma(prior + number) - lgamma(prior) for prior, number in drawn) - lgamma(1 + done.total())

    return lambda one, other: likelihood(one + other) - likelihood(one) - likelihood(other)


def _clusters(
    deeds: Mapping[Group, Counter[Deed]],
    log_odds: LogOdds,
    possible: Callable[[Groups], bool] = lambda groups: True,
) -> list[Groups]:
    """Groups put together as long as the odds are `_ODDS` and it is possible, the most probable pair first (Bayesian
    hierarchical clustering, Heller and Ghahramani 2005). Args: `deeds`, what was done for each group, how often."""

    def likely(pairs: Iterable[tuple[Groups, Groups]]) -> dict[tuple[Groups, Groups], float]:
        common = (pair for pair in pairs if found[pair[0]].keys() & found[pair[1]].keys())
        every = {pair: log_odds(found[pair[0]], found[pair[1]]) for pair in common}
        return {pair: odds for pair, odds in every.items() if odds >= log(_ODDS)}

    found: dict[Groups, Counter[Deed]] = {(group,): done for group, done in deeds.items()}
    left = likely(combinations(found, 2))
    while left:
        one, other = max(left, key=left.__getitem__)
        if not possible(both := one + other):
            del left[one, other]
            continue
        found[both] = found.pop(one) + found.pop(other)
        left = {pair: odds for pair, odds in left.items() if not {*pair} & {one, other}}
        left |= likely((each, both) for each in found if each != both)
    return [*found]


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
