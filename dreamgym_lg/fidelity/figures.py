"""Figures that carry their number of samples and interval; from no sample there is none."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import NamedTuple

from dreamgym_lg.statistics import Rate, wilson

# Chinese and Japanese are written without spaces, so there each character is a word (as in retrieval).
_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]")


class Mean(NamedTuple):
    """A mean over at least one value, with its 95 % interval; no interval where the values allow none."""

    value: float
    n: int
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]")


def rate(outcomes: Iterable[bool]) -> Rate | None:
    """The share of true ones with its Wilson interval; None of no outcome."""
    given = [bool(outcome) for outcome in outcomes]
    return Rate(sum(given), len(given), *wilson(sum(given), len(given))) if given else None


def mean(values: Sequence[float], *, top: float | None = None) -> Mean | None:
    """The mean with its interval; None of no value.

    Args: `top`, where every value lies between 0 and it: the interval is then Wilson's for a rate of that size, wider than
    need be and never empty. Otherwise it is 1.96 standard errors, and there is none for values that do not vary.
    """
    n = len(values)
    if not n:
        return None
    value = sum(values) / n
    if top is not None:
        low, high = wilson(min(sum(values) / top, n), n)  # type: ignore[arg-type]  # a fraction of a success, bounded alike
        return Mean(value, n, low * top, high * top)
    margin = 1.96 * sqrt(sum((each - value) ** 2 for each in values) / (n - 1) / n) if n > 1 else 0.0
    return Mean(value, n, value - margin, value + margin) if margin else Mean(value, n)


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
