"""Confidence intervals of rates and means over few episodes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.retrieval import WORD

FEW_EPISODES = 10
"""Number of episodes below which their variance is not used."""


def wilson(successes: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a success rate (Wilson 1927). 95 % at the default `z`.

    Inside 0..1; (0, 1) for `n=0`. `successes` may be a fraction. Raises ConfigurationError unless 0 <= successes <= n.
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


def paired_interval(pairs: Sequence[tuple[bool, bool]]) -> tuple[float, float]:
    """The 95 % interval of a difference of paired success rates, first minus second.

    Wald's interval with half a pair added to each of the four cells (Agresti and Min 2005, Statistics in Medicine 24), between
    -1 and 1. Needs at least one pair.
    """
    n = len(pairs) + 2
    first, second = sum(a and not b for a, b in pairs) + 0.5, sum(b and not a for a, b in pairs) + 0.5
    gain = (first - second) / n
    margin = 1.96 * sqrt((first + second) / n - gain * gain) / sqrt(n)
    return max(-1.0, gain - margin), min(1.0, gain + margin)


def clustered_interval(episodes: Iterable[Sequence[float]]) -> tuple[float, float]:
    """The 95 % interval of a rate over steps, clustered by episode. (0, 1) without a step.

    Wilson's interval for the effective number of independent steps (Kish; variance by the ratio estimator over whole episodes,
    Cochran 1977, Sampling Techniques, section 9A), at most the number of steps. With fewer than FEW_EPISODES episodes, or
    without variation among them, it is Wilson's interval for the number of episodes.

    Args: `episodes`, one sequence of values 0 to 1 for each episode; empty ones do not count.
    """
    clusters = [values for values in episodes if values]
    m, n = len(clusters), sum(map(len, clusters))
    share = sum(map(sum, clusters)) / n if n else 0.0
    if n == m:
        return wilson(share * n, n)
    deviations = (sum(values) - len(values) * share for values in clusters)
    variance = sum(each * each for each in deviations) / n**2 * m / (m - 1) if m >= FEW_EPISODES else 0.0
    if variance < 1e-24:
        return wilson(share * m, m)
    trials = min(n, share * (1 - share) / variance)
    return wilson(share * trials, trials, _student(0.95, m - 1))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's interval of a mean of values between -1 and 1. (-1, 1) for fewer than FEW_EPISODES values.

    If all values are equal, the margin is Wilson's upper bound of the share of other values, of which none was seen.
    """
    n = len(values)
    if n < FEW_EPISODES:
        return -1.0, 1.0
    mean, margin = fmean(values), _student(confidence, n - 1) * float(np.std(values, ddof=1)) / sqrt(n)
    if margin < 1e-12:
        margin = wilson(0, n, NormalDist().inv_cdf((1 + confidence) / 2))[1]
    return max(-1.0, mean - margin), min(1.0, mean + margin)


def _student(confidence: float, df: int) -> float:
    """The two-sided quantile of Student's t. Within 0.2 % from nine degrees of freedom on (Cornish and Fisher)."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


class Rate(NamedTuple):
    """A success rate over at least one episode, with its 95 % interval."""

    successes: int
    episodes: int
    low: float
    high: float
    invalid_share: float | None = None
    """Share of invalid actions in these episodes; None if unknown."""

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


class StepRate(NamedTuple):
    """A share of steps, with the interval of `clustered_interval`."""

    successes: int
    steps: int
    episodes: int
    """Number of episodes that the steps are from."""
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.successes / self.steps

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def clustered_rate(outcomes: Iterable[tuple[str, bool]]) -> Rate | None:
    """The share of successful episodes, clustered by task. None without an episode.

    Args: `outcomes`, (task id, success) of each episode.
    """
    clusters = defaultdict[str, list[bool]](list)
    for task, outcome in outcomes:
        clusters[task].append(bool(outcome))
    steps = step_rate(clusters.values())
    return None if steps is None else Rate(steps.successes, steps.steps, steps.low, steps.high)


def step_rate(episodes: Iterable[Sequence[bool]]) -> StepRate | None:
    """The share of true steps, with the interval of `clustered_interval`; None without a step."""
    clusters = [each for each in episodes if each]
    if not clusters:
        return None
    return StepRate(sum(map(sum, clusters)), sum(map(len, clusters)), len(clusters), *clustered_interval(clusters))


def normalised(text: str) -> str:
    """The text without case, extra whitespace and punctuation. A text without words is only stripped."""
    return " ".join(WORD.findall(text.casefold())) or text.strip()
