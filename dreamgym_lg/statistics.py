"""Intervals and tests of rates and means over few episodes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.retrieval import WORD

FEW_EPISODES = 10
"""Below so many episodes their variance says too little."""


def wilson(successes: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a success rate (Wilson 1927), 95 % at the default `z`.

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
    """The 95 % interval of the first success rate minus the second, of outcomes on the same tasks; at least one pair.

    Wald's interval with half a pair added to each of the four cells (Agresti and Min 2005, Statistics in Medicine 24).
    """
    n = len(pairs) + 2
    first, second = sum(a and not b for a, b in pairs) + 0.5, sum(b and not a for a, b in pairs) + 0.5
    gain = (first - second) / n
    margin = 1.96 * sqrt((first + second) / n - gain * gain) / sqrt(n)
    return gain - margin, gain + margin


def difference_interval(a: tuple[int, int], b: tuple[int, int]) -> tuple[float, float]:
    """The 95 % interval of the rate of `a` minus that of `b`, each (successes, trials) of at least one trial.

    Newcombe's hybrid score interval (1998, Statistics in Medicine 17, method 10), between -1 and 1.
    """
    return difference_of_rates(Rate.of(*a), Rate.of(*b))


def clustered_interval(episodes: Sequence[Sequence[float]], *, top: float | None = None) -> tuple[float, float] | None:
    """The 95 % interval of a mean over steps, clustered by episode.

    Student's interval of the ratio estimator over whole episodes (Cochran 1977, Sampling Techniques, section 9A).

    Args:
        episodes: One sequence of values for each episode; empty ones do not count.
        top: Where every value lies between 0 and `top` (1 for a rate), the interval is Wilson's for so many independent steps
            as would vary as much (Kish's effective sample size), at most for all steps. With fewer than FEW_EPISODES episodes,
            or no variation among them, it is Wilson's for the number of episodes; without `top` it is None.
    """
    clusters = [values for values in episodes if values]
    m, n, total = len(clusters), sum(map(len, clusters)), float(sum(map(sum, clusters)))
    if top is not None and n == m:
        return _scaled(total / n if n else 0.0, n, top)
    deviations = (sum(values) - len(values) * total / n for values in clusters)
    variance = sum(each * each for each in deviations) / n**2 * m / (m - 1) if m >= FEW_EPISODES else 0.0
    if variance < 1e-24:
        return None if top is None else _scaled(total / n if n else 0.0, m, top)
    # Cornish and Fisher's expansion of Student's t: within 0.2 % of the exact quantile from nine degrees of freedom on.
    z, df = NormalDist().inv_cdf(0.975), m - 1
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    if top is None:
        return total / n - t * sqrt(variance), total / n + t * sqrt(variance)
    return _scaled(total / n, min(n, total / n * (top - total / n) / variance), top, t)


def _scaled(mean: float, trials: float, top: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a mean of values in 0..top."""
    share = min(max(mean / top, 0.0), 1.0)  # rounding may leave 1 + 1e-16
    low, high = wilson(share * trials, trials, z)
    return low * top, high * top


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


def difference_of_rates(a: Rate, b: Rate) -> tuple[float, float]:
    """The 95 % interval of rate `a` minus rate `b`, from their intervals (`difference_interval`)."""
    low = sqrt((a.value - a.low) ** 2 + (b.high - b.value) ** 2)
    high = sqrt((a.high - a.value) ** 2 + (b.value - b.low) ** 2)
    return a.value - b.value - low, a.value - b.value + high


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


class Mean(NamedTuple):
    """A mean over at least one value, with its 95 % interval, if any."""

    value: float
    n: int
    """Number of values: one a step, or one an episode."""
    episodes: int
    """Number of episodes that they are from."""
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]")


Figure = Rate | StepRate | Mean
"""Any figure with its number of samples and its interval."""


def rate(outcomes: Iterable[bool]) -> Rate | None:
    """The share of episodes, with its Wilson interval; None of no outcome."""
    trials = [bool(outcome) for outcome in outcomes]
    return Rate.of(sum(trials), len(trials)) if trials else None


def clustered_rate(outcomes: Iterable[tuple[str, bool]]) -> Rate | None:
    """The share of episodes that something is true of, those of one task taken for alike; None of no outcome.

    Args: `outcomes`, of each episode its task and its outcome.
    """
    clusters: dict[str, list[bool]] = {}
    for task, outcome in outcomes:
        clusters.setdefault(task, []).append(bool(outcome))
    values = list(clusters.values())
    interval = clustered_interval(values, top=1) if values else None
    return None if interval is None else Rate(sum(map(sum, values)), sum(map(len, values)), *interval)


def step_rate(episodes: Iterable[Iterable[bool]]) -> StepRate | None:
    """The share of steps, with the interval of `clustered_interval`; None of no step."""
    clusters = [outcomes for each in episodes if (outcomes := [bool(outcome) for outcome in each])]
    interval = clustered_interval(clusters, top=1)
    if not clusters or interval is None:
        return None
    return StepRate(sum(map(sum, clusters)), sum(map(len, clusters)), len(clusters), *interval)


def mean(values: Sequence[float], *, top: float | None = None) -> Mean | None:
    """The mean of one value an episode; None of no value."""
    return step_mean([[value] for value in values], top=top)


def step_mean(episodes: Iterable[Iterable[float]], *, top: float | None = None) -> Mean | None:
    """The mean over steps, with the interval of `clustered_interval`; None of no value."""
    clusters = [values for each in episodes if (values := list(each))]
    if not (n := sum(map(len, clusters))):
        return None
    return Mean(sum(map(sum, clusters)) / n, n, len(clusters), *(clustered_interval(clusters, top=top) or (None, None)))


def normalised(text: str) -> str:
    """The words alone: case, whitespace and punctuation do not count. A text without words stays as it is."""
    return " ".join(WORD.findall(text.casefold())) or text.strip()


def token_f1(answer: str, right: str) -> float:
    """Harmonic mean of the precision and recall of the words."""
    answer, right = normalised(answer), normalised(right)
    words, others = Counter(answer.split()), Counter(right.split())
    if not words or not others:
        return float(answer == right)
    return 2 * (words & others).total() / (words.total() + others.total())
