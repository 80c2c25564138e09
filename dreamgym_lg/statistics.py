"""Intervals for success rates: what a handful of episodes can and cannot prove."""

from math import sqrt
from typing import NamedTuple

from dreamgym_lg.errors import ConfigurationError


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a success rate (Wilson 1927), 95 % at the default `z`.

    Stays inside 0..1 and keeps a sensible width at 0 and n successes, where the usual rate ± error has none. Without a
    trial nothing is known: `n=0` gives (0, 1). Raises ConfigurationError unless 0 <= successes <= n.
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

    @property
    def value(self) -> float:
        return self.successes / self.episodes

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"
