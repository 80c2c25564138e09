"""The cases that recorded successes were right in: what their lookups were answered."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, combinations
from math import comb
from typing import Any, NamedTuple

from dreamgym_lg.curriculum.plays import Place, Play, Scalar, Values, is_empty, number_of, text_of, unnumbered, without_values

Kind = tuple[tuple[str, ...], ...]
"""Of each call the tool and where each argument's value was taken from; of one that has few values, such as a reason, the
value, unless the request says it."""

Deed = tuple[Kind, str]
"""The calls of a success and, where none of them writes, its answer without its values."""

_EMPTY: Mapping[str, Scalar] = {"": None}
_NAMED = "(something)"
"""In place of a value of which only matters that there is one."""
_FLAG = 6
"""Most values of a place, in all traces, that make it a condition whatever they are."""


_DECIDING = 3
"""Most conditions together that what is done is thought to depend on."""
_COMPARED, _TRIED = 120, 200_000
"""Different successes that are compared with each other, and sets of conditions times pairs of them that are tried."""
_PAIRS = 1_000
"""Most pairs of numbers from different traces whose difference is compared with those in successes."""
_SHOWN = 3
"""Successes in which a condition was another than usual, and nothing else was done, that show that it decides nothing."""
_CONSTANT = 3
"""Successes with the same calls, all with the same amount in one, that show that it is a fixed one: a fee."""
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
    values: Values
    """Without the answers of its calls that write."""

    @property
    def deed(self) -> Deed:
        return self.kind, "" if self.writes else without_values(self.play)

    @property
    def outcome(self) -> Deed:
        """As `deed`, whatever was looked up before something was written."""
        return (self.writes, "") if self.writes else self.deed

    @property
    def answers(self) -> dict[Place, Scalar]:
        """What its lookups were answered."""
        return {place: next(iter(found.values())) for place, found in self.values.items() if place[0] == "answer"}

    def has(self, place: Place, text: str) -> bool:
        """Whether this value stands there, or one at all for `_NAMED`."""
        texts = self.values.get(place, _EMPTY)
        return not all(map(is_empty, texts)) if text == _NAMED else text in texts or (not text and any(map(is_empty, texts)))


class Done(NamedTuple):
    """What a success did, and the conditions that its lookups told it before."""

    told: Mapping[Place, str]
    deed: Deed
    success: Success

    def shaped_as(self, other: "Done") -> bool:
        """Whether what both looked up has values for the same: a list of two is never the case that a list of three is."""
        shared = {place[1] for place in self.told} & {place[1] for place in other.told}
        return not any(place[1] in shared for place in self.told.keys() ^ other.told.keys())

    def in_case_of(self, other: "Done", deciding: Iterable[Place]) -> bool:
        """Whether both met the same as far as both looked, in what decides."""
        met = [place for place in deciding if place in self.told and place in other.told]
        return self.shaped_as(other) and all(self.told[place] == other.told[place] for place in met)


class Cases:
    """Whether new answers make a case that successes with the same calls have been in.

    A place where few values stand (a status, a tier) is a *condition*, and of one where sometimes nothing stands (a free car's
    id) whether something does. A case has been seen if one success had the values of all conditions, or if for each pair of
    conditions some success had both values: what is done may depend on two conditions at once, and the traces do not hold every
    combination of more. Each amount and date has to be between those of the
    successes with the same conditions. Anything else (an id, a name) may be new.

    Of a condition that decides nothing (the colour of a car that is to be returned) each value must have been seen, but not
    with those of the others. It is one that the group shows to be such: others suffice to tell apart whoever did different
    things (`_DECIDING` at most, the fewest that do), and it was another in `_SHOWN` successes that did the same.

    Args:
        counts: How often each value stands in each place, in all traces.
        group: Successes whose requests ask alike, whatever was done: what has few values among them is a condition.
        deeds: What each of the group did, in several ways to tell it, of which the first counts that conditions explain. Empty:
            every condition decides.
    """

    def __init__(
        self,
        counts: Mapping[Place, Mapping[str, int]],
        group: Sequence[Success] = (),
        deeds: Sequence[Sequence[Deed]] = (),
    ) -> None:
        self._counts, self._group, self._deeds = counts, group, deeds
        self._few: dict[Place, bool] = {}
        self._empty: dict[Place, bool] = {}

    def among(self, group: Sequence[Success], deeds: Sequence[Sequence[Deed]] = ()) -> "Cases":
        """The cases of requests that ask alike. Args: `deeds`, as of the class."""
        return Cases(self._counts, group, deeds)

    def is_flag(self, place: Place) -> bool:
        """Whether so few values stand there that it is a condition whatever they are."""
        return len(self._counts.get(unnumbered(place), ())) <= _FLAG

    def seen(self, successes: Sequence[Success], found: Mapping[Place, Scalar]) -> bool:
        """Whether these successes have been in the case that the values `found` make."""
        conditions = self.conditions(found)
        irrelevant = {place: conditions.pop(place) for place in [*conditions] if place in self._irrelevant}
        if not all(between(_with(successes, [value]), found) for value in irrelevant.items()):
            return False
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
        told = ((each, shared) for each, shared in told if _comparable(each.answers, found))
        agreeing = [each for each, shared in told if shared and all(each.has(place, text) for place, text in shared.items())]
        return bool(agreeing) and not _apart(own, agreeing, found) or self.seen(others, found)

    def met_together(self, successes: Sequence[Success], found: Mapping[Place, Scalar], traces: Sequence[Values]) -> bool:
        """Whether these successes show that values from different traces may stand in one request.

        * One success had all the conditions, except those that decide nothing.
        * Of each two conditions of which one decides nothing, some success had both, unless one trace has both.
        * Two amounts or dates that no trace has together differ by no less and no more than in the successes. That holds among
          the successes with each single condition: a bill is within the balance for a plain customer, where only gold ones may
          owe.

        False where there are too many numbers to compare (`_PAIRS`).

        Args:
            found: What the lookups answer and the calls are given.
            traces: Of each trace that values are from.
        """
        conditions = self.conditions({place: value for place, value in found.items() if place[0] == "answer"})
        # where all did the same, nothing shows what would have made them do something else
        irrelevant = self._irrelevant if len({*chain(*self._deeds[:1])}) > 1 else frozenset[Place]()
        decisive = [each for each in conditions.items() if each[0] not in irrelevant]
        if not _with(successes, decisive):
            return False

        def is_recorded(pair: tuple[Place, Place]) -> bool:
            return any(all(text_of(found[place]) in trace.get(place, ()) for place in pair) for trace in traces)

        both = [pair for pair in combinations(conditions, 2) if irrelevant & {*pair} and not is_recorded(pair)]
        numbers = {place: number for place, value in found.items() if (number := number_of(value)) is not None}
        differing = [pair for pair in combinations(numbers, 2) if not is_recorded(pair)]
        groups = [list(successes), *(_with(successes, [each]) for each in decisive)]
        return (
            len(differing) <= _PAIRS
            and all(_with(successes, ((place, conditions[place]) for place in pair)) for pair in both)
            and all(_differ(group, pair, numbers[pair[0]] - numbers[pair[1]]) for pair in differing for group in groups)
        )

    def alike(self, successes: Sequence[Success], found: Mapping[Place, Scalar]) -> Sequence[Success]:
        """Those of the successes that have been in the case, numbers aside; all where none has been in the whole of it."""
        return self.met(successes, found) or successes

    def met(self, plays: Sequence[Success], found: Mapping[Place, Scalar]) -> list[Success]:
        """Those of the successes or failures that have been in the case, numbers aside."""
        conditions = self.conditions(found).items()
        return _with(plays, (each for each in conditions if each[0] not in self._irrelevant))

    def conditions(self, found: Mapping[Place, Scalar]) -> dict[Place, str]:
        """Those of the values that stand where few do, as texts; of one that may be nothing, whether it is ("" or `_NAMED`)."""
        few = {place for place in found if self.is_flag(place) or self._has_few(place)}
        told = {place: text_of(value) for place, value in found.items() if place in few}
        some = {place: "" if is_empty(value) else _NAMED for place, value in found.items() if self._may_be_empty(place)}
        return some | told

    def _may_be_empty(self, place: Place) -> bool:
        if place not in self._empty:
            self._empty[place] = place[0] == "answer" and any(map(is_empty, self._counts.get(unnumbered(place), ())))
        return self._empty[place]

    def _has_few(self, place: Place) -> bool:
        if place not in self._few:
            texts = set[str]().union(*(each.values.get(place, _EMPTY) for each in self._group))
            self._few[place] = 0 < len(texts) ** 2 <= len(self._group)
        return self._few[place]

    @cached_property
    def _irrelevant(self) -> frozenset[Place]:
        """The conditions that decide nothing."""
        for deeds in self._deeds:
            done = [Done(self.conditions(each.answers), deed, each) for each, deed in zip(self._group, deeds, strict=True)]
            if found := telling_apart(done):
                deciding = frozenset[Place]().union(*found)
                places = {place for each in done for place in each.told} - deciding
                shown = [place for place in places if _varied(place, done, deciding) >= _SHOWN]
                return frozenset(place for place in shown if not self._limits(place))
        return frozenset()

    def _limits(self, place: Place) -> bool:
        """Whether amounts or dates are others with one of its values: then it decides, by a limit of theirs."""
        numbers = dict(pair for each in self._group for pair in each.answers.items())
        for text in {text for each in self._group for text in each.values.get(place, ())}:
            having = [each for each in self._group if each.has(place, text)]
            others = [each for each in self._group if place in each.values and not each.has(place, text)]
            if _apart(having, others, numbers):
                return True
        return False


def _comparable(one: Mapping[Place, Any], other: Mapping[Place, Any]) -> bool:
    """Whether the answers of each lookup that both made have a place in common: "nothing found" and a record have none."""
    both = {place[1] for place in one} & {place[1] for place in other}
    return both == {place[1] for place in one.keys() & other.keys()}


def telling_apart(done: Sequence[Done]) -> list[frozenset[Place]]:
    """The fewest conditions in which any two that did different things differ: all such sets.

    Two deeds that a limit of an amount or a date tells apart need none.
    Empty where no set does, and where there are too many to try (`_TRIED`): lists of long records.
    """
    different = list({(each.deed, frozenset(each.told.items())): each for each in done}.values())[:_COMPARED]
    between_deeds: dict[frozenset[Deed], tuple[set[frozenset[Place]], Done, Done]] = {}
    for first, second in combinations(different, 2):
        if first.deed != second.deed and first.shaped_as(second):
            both = first.told.keys() & second.told.keys()
            apart = frozenset(place for place in both if first.told[place] != second.told[place])
            if apart or first.told.keys() == second.told.keys():  # else one of them may not have looked at what decides
                between_deeds.setdefault(frozenset({first.deed, second.deed}), (set(), first, second))[0].add(apart)
    differing = set[frozenset[Place]]()
    for found, first, second in between_deeds.values():
        if not limited(done, first, second):
            differing |= found
    needed = list[frozenset[Place]]()
    for each in sorted(differing, key=len):
        if not any(other <= each for other in needed):
            needed.append(each)
    places = sorted(frozenset[Place]().union(*needed))
    for number in range(_DECIDING + 1):
        if comb(len(places), number) * len(needed) > _TRIED:
            return []
        chosen = map(frozenset, combinations(places, number))
        if sets := [each for each in chosen if all(each & one for one in needed)]:
            return sets
    return []


def limited(done: Sequence[Done], first: Done, second: Done) -> bool:
    """Whether a limit of an amount or a date tells apart what these two did, in all that did either."""
    ones, others = ([each.success for each in done if each.deed == one.deed] for one in (first, second))
    return _apart(ones, others, dict(pair for each in (*ones, *others) for pair in each.answers.items()))


def _varied(place: Place, done: Sequence[Done], deciding: frozenset[Place]) -> int:
    """In how many successes the place has another value than it mostly has where the same was done and decided."""
    values: dict[Hashable, Counter[str]] = defaultdict(Counter)
    for each in done:
        if place in each.told:
            values[each.deed, tuple(each.told.get(other) for other in sorted(deciding))][each.told[place]] += 1
    return sum(found.total() - max(found.values()) for found in values.values())


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


def _differ(successes: Sequence[Success], places: tuple[Place, Place], by: float) -> bool:
    """Whether two numbers differ by no less and no more than in the successes. Args: `by`, the first minus the second."""
    first, second = places
    known = [one - other for each in successes for one in _numbers([each], first) for other in _numbers([each], second)]
    return bool(known) and min(known) <= by <= max(known)


def between(successes: Sequence[Success], found: Mapping[Place, Scalar]) -> bool:
    """Whether each amount and date is between those of the successes."""
    for place, value in found.items():
        if (number := number_of(value)) is not None:
            known = _numbers(successes, place)
            if not known or not min(known) <= number <= max(known):
                return False
    return bool(successes)


def are_fixed(arguments: Sequence[tuple[Place, str]], successes: Sequence[Success]) -> bool:
    """Whether all the successes with these calls had the same values in these arguments: a fee."""
    same = all({text} == each.values[place].keys() for place, text in arguments for each in successes)
    return same and len(successes) >= _CONSTANT
