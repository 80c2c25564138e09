"""Rates and means that carry their number of samples and interval; from no sample there is none."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dreamgym_lg.statistics import Rate, clustered_interval, wilson

# Chinese and Japanese are written without spaces, so there each character is a word (as in retrieval).
_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")


class StepRate(NamedTuple):
    """The share of steps that something is true of, with the 95 % interval of `clustered_interval`."""

    successes: int
    steps: int
    episodes: int
    """How many episodes the steps are from. A sample of many steps from few episodes says little."""
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.successes / self.steps

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


class Mean(NamedTuple):
    """A mean over at least one value, with its 95 % interval; no interval where the values allow none."""

    value: float
    n: int
    """How many values: one a step, or one an episode."""
    episodes: int
    """How many episodes they are from."""
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]")


Figure = Rate | StepRate | Mean
"""Any figure with its number of samples and its interval."""


def rate(outcomes: Iterable[bool]) -> Rate | None:
    """The share of episodes (or tasks) that something is true of, with its Wilson interval; None of no outcome."""
    given = [bool(outcome) for outcome in outcomes]
    return Rate(sum(given), len(given), *wilson(sum(given), len(given))) if given else None


def step_rate(episodes: Iterable[Iterable[bool]]) -> StepRate | None:
    """The share of steps that something is true of, with the interval of `clustered_interval`; None of no step.

    Args: `episodes`, for each episode the outcomes of those of its steps that count; an episode without one does not count.
    """
    given = [outcomes for each in episodes if (outcomes := [bool(outcome) for outcome in each])]
    interval = clustered_interval(given, top=1)
    if not given or interval is None:
        return None
    return StepRate(sum(map(sum, given)), sum(map(len, given)), len(given), *interval)


def mean(values: Sequence[float], *, top: float | None = None) -> Mean | None:
    """The mean of one value an episode; None of no value. `top` as in `step_mean`."""
    return step_mean([[value] for value in values], top=top)


def step_mean(episodes: Iterable[Iterable[float]], *, top: float | None = None) -> Mean | None:
    """The mean over steps, with the interval of `clustered_interval`; None of no value.

    Args:
        episodes: For each episode the values of those of its steps that count.
        top: Where every value lies between 0 and it, there always is an interval, inside 0..top.
    """
    given = [values for each in episodes if (values := list(each))]
    n = sum(map(len, given))
    if not n:
        return None
    return Mean(sum(map(sum, given)) / n, n, len(given), *(clustered_interval(given, top=top) or (None, None)))


def normalised(text: str) -> str:
    """The words alone: case, whitespace and punctuation do not count. A text without words stays as it is."""
    return " ".join(_WORD.findall(text.casefold())) or text.strip()


def token_f1(given: str, right: str) -> float:
    """Harmonic mean of the precision and recall of the words, 0 to 1; two texts without words agree if they are equal."""
    given, right = normalised(given), normalised(right)
    words, wanted = Counter(given.split()), Counter(right.split())
    if not words or not wanted:
        return float(given == right)
    common = (words & wanted).total()
    return 2 * common / (words.total() + wanted.total())
