"""Intervals and tests of rates and means: what a handful of episodes can and cannot prove."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dreamgym_lg.errors import ConfigurationError

FEW_EPISODES = 10
"""Below so many episodes a bootstrap over them is too narrow, and `clustered_interval` uses none."""
_RESAMPLES, _SEED, _DRAWN_AT_ONCE = 2000, 0, 1_000_000


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a success rate (Wilson 1927), 95 % at the default `z`.

    Stays inside 0..1 and keeps a sensible width at 0 and n successes, where the usual rate ± error has none. Without a
    trial nothing is known: `n=0` gives (0, 1). `successes` may be a fraction, as the sum of scores between 0 and 1 is.
    Raises ConfigurationError unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ConfigurationError(f"successes must be between 0 and n={n}, got {successes}")
    if n == 0:
        return 0.0, 1.0
    rate = successes / n
    scale = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    margin = z * sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / scale
    # The two ends are exact in theory; rounding would leave 1e-18 instead of 0.
    return (0.0 if successes == 0 else centre - margin), (1.0 if successes == n else centre + margin)


def difference_interval(a: tuple[int, int], b: tuple[int, int]) -> tuple[float, float]:
    """The 95 % interval of the rate of `a` minus that of `b`, each (successes, trials) of at least one trial.

    Newcombe's hybrid score interval (1998, Statistics in Medicine 17, method 10): made of Wilson's intervals, between -1 and 1.
    """
    p, q = a[0] / a[1], b[0] / b[1]
    (low_a, high_a), (low_b, high_b) = wilson(*a), wilson(*b)
    low, high = sqrt((p - low_a) ** 2 + (high_b - q) ** 2), sqrt((high_a - p) ** 2 + (q - low_b) ** 2)
    return p - q - low, p - q + high


def clustered_interval(episodes: Sequence[Sequence[float]], *, top: float | None = None) -> tuple[float, float] | None:
    """The 95 % interval of a mean over steps, where the steps of one episode may resemble each other.

    Steps of one episode are right or wrong together more often than steps of different episodes, so an interval that counts
    every step as a trial of its own is too narrow. Here whole episodes are drawn again, with replacement (a bootstrap over
    clusters, 2000 draws from a fixed seed: the same values always give the same interval). Its percentiles are widened for
    the number of episodes ("expanded percentiles", Hesterberg 2015, What Teachers Should Know About the Bootstrap).

    Args:
        episodes: One sequence of values for each episode; empty ones do not count.
        top: Where every value lies between 0 and `top` (1 for a rate), the interval stays inside and is never narrower than
            Wilson's for independent steps. Where the bootstrap says nothing - fewer than FEW_EPISODES episodes, or all
            draws alike, as when every step is right - it is Wilson's with the number of *episodes* as sample size: the
            steps of an episode then count as one, which is the most cautious assumption. Without `top` there is no
            interval in these two cases.

    Returns (low, high), or None where the values allow no interval. Episodes of one value each are independent: with `top`
    they get Wilson's interval.
    """
    given = [values for values in episodes if values]
    m, n, total = len(given), sum(map(len, given)), float(sum(map(sum, given)))
    if top is not None and n == m:
        return _scaled(total, n, n, top)
    found = _bootstrap(given) if m >= FEW_EPISODES else None
    if found is None:
        return None if top is None else _scaled(total, n, m, top)
    if top is None:
        return found
    independent = _scaled(total, n, n, top)
    return min(found[0], independent[0]), max(found[1], independent[1])


def _scaled(total: float, values: int, trials: int, top: float) -> tuple[float, float]:
    """Wilson's interval of the mean of `values` values in 0..top, as if they came from so many independent trials."""
    share = min(max(total / top / max(values, 1), 0.0), 1.0)  # rounding may leave 1 + 1e-16
    low, high = wilson(share * trials, trials)
    return low * top, high * top


def _bootstrap(episodes: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Expanded percentiles of the mean over redrawn episodes; None if every draw has the same mean."""
    m = len(episodes)
    # Cornish and Fisher's expansion of Student's t: within 0.2 % of the exact quantile from nine degrees of freedom on.
    z, df = NormalDist().inv_cdf(0.975), m - 1
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    tail = NormalDist().cdf(-t * sqrt(m / df))
    low, high = (float(end) for end in np.quantile(_redrawn_means(episodes), [tail, 1 - tail]))
    return (low, high) if high - low > 1e-12 else None


def _redrawn_means(episodes: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    sums = np.array([sum(values) for values in episodes], float)
    counts = np.array([len(values) for values in episodes], float)
    rng, m = np.random.default_rng(_SEED), len(episodes)
    rows = max(1, _DRAWN_AT_ONCE // m)  # bounds the memory, whatever the number of episodes
    means = []
    for start in range(0, _RESAMPLES, rows):
        drawn = rng.integers(m, size=(min(rows, _RESAMPLES - start), m))
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    return np.concatenate(means)


def intervals_apart(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """True when the intervals share no point; touching ends are shared. Stricter than a test of the difference."""
    return a[1] < b[0] or b[1] < a[0]


class Rate(NamedTuple):
    """A success rate over at least one episode, with its 95 % interval."""

    successes: int
    episodes: int
    low: float
    high: float
    invalid_share: float | None = None
    """Share of invalid actions in these episodes; None where it was not counted."""

    @classmethod
    def of(cls, successes: int, episodes: int) -> "Rate":
        """The rate with Wilson's interval."""
        return cls(successes, episodes, *wilson(successes, episodes))

    @property
    def value(self) -> float:
        return self.successes / self.episodes

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


# --- figures with their number of samples ---------------------------------------------------------------------------------

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
    trials = [bool(outcome) for outcome in outcomes]
    return Rate.of(sum(trials), len(trials)) if trials else None


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
