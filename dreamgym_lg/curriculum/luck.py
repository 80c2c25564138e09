"""Which recorded successes were right by luck: they looked up less than is needed to know what to do."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from dreamgym_lg.curriculum.cases import Cases, Success
from dreamgym_lg.curriculum.plays import Place, Play

_NEEDLESS = 5
"""Successes that all go without a lookup which others made, to show that it is not needed."""


def careful(
    alike: Sequence[Success], failures: Sequence[Success], cases: Cases, *, writes: Callable[[str], bool]
) -> list[Success]:
    """The successes without those that were right by luck.

    Args:
        alike: Successes whose requests ask for the same.
        failures: What failed of such requests, as successes.
        cases: Of all traces.
        writes: Whether a tool, by name, changes the world.
    """
    found = _Alike(alike, failures, cases.among(alike, [[each.outcome for each in alike]]), writes)
    lucky, kept = dict[Hashable, bool](), list[Success]()
    for each in alike:
        case = found.case(each)
        if case not in lucky:
            lucky[case] = found.is_lucky(each)
        kept += [] if lucky[case] else [each]
    return kept


class _Alike:
    """Successes and failures of requests that ask for the same. Args: as of `careful`."""

    def __init__(
        self, alike: Sequence[Success], failures: Sequence[Success], cases: Cases, writes: Callable[[str], bool]
    ) -> None:
        self._alike, self._failures, self._cases, self._writes = alike, failures, cases, writes

    def case(self, success: Success) -> Hashable:
        """What it did in which case: whoever did the same was as lucky."""
        return success.kind, frozenset(self._cases.conditions(success.answers).items())

    def is_lucky(self, success: Success) -> bool:
        """Whether it lacks a usual lookup, or the same calls failed in its case and more careful ones did not."""
        conditions, others = self._cases.conditions(success.answers), self._cases.met(self._alike, success.answers)
        same = [other for other in others if all(other.has(*condition) for condition in conditions.items())]
        usual = self._usual(others) | (self._usual(same) if len(same) >= _NEEDLESS else set()) | self._before_writing(success)
        skipped = usual.difference(success.play.names())
        needless = all(_needless(name, conditions, self._alike) for name in skipped)
        return not needless or self._failed(success, others)

    def _usual(self, successes: Sequence[Success]) -> set[str]:
        """The lookups that most of the successes made: the tools, and `TOOL 2` where it was asked twice."""
        named = (pair for each in successes for pair in zip(each.play.names(), each.play.tools, strict=True))
        looked_up = Counter(name for name, tool in named if not self._writes(tool))
        return {name for name, number in looked_up.items() if 2 * number > len(successes)}

    def _before_writing(self, success: Success) -> set[str]:
        """What others looked up, in any case, before they wrote with the same tools.

        Nothing where enough successes made the same calls without it: more than failed with them, and at least `_NEEDLESS` or
        more than the successes that looked up more.
        """
        written = self._written(success.play)
        others = (each.play for each in self._alike if written and self._written(each.play) == written)
        more = [play for play in others if {*play.names()} > {*success.play.names()}]
        same, failed = (sum(each.kind == success.kind for each in some) for some in (self._alike, self._failures))
        return set().union(*(play.names() for play in more)) if same <= max(failed, min(len(more), _NEEDLESS - 1)) else set()

    def _written(self, play: Play) -> set[str]:
        return {name for name, tool in zip(play.names(), play.tools, strict=True) if self._writes(tool)}

    def _failed(self, success: Success, others: Sequence[Success]) -> bool:
        """Whether the same calls failed, and those of another with this outcome, who looked up more, did not: in its case."""
        failed = {each.kind for each in self._cases.met(self._failures, success.answers)}
        if success.kind not in failed:
            return False
        more = (each for each in others if each.kind not in failed and {*each.play.names()} > {*success.play.names()})
        return any(each.outcome == success.outcome for each in more)


def _needless(lookup: str, conditions: Mapping[Place, str], successes: Sequence[Success]) -> bool:
    """Whether enough successes had one of these conditions, and none of them made the lookup: a gold customer's refund."""
    met = ([each for each in successes if each.has(*condition)] for condition in conditions.items())
    return any(len(some) >= _NEEDLESS and not any(lookup in each.play.names() for each in some) for some in met)
