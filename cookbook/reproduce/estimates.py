"""Statistics of the tables: success over seeds, paired tests, and real steps for the same success."""

from collections.abc import Iterable, Mapping, Sequence
from math import comb
from typing import Any, NamedTuple

import numpy as np

from dreamgym_lg.statistics import wilson

Figures = Mapping[str, Any]
"""What `results/CELL.json` holds."""
_DRAWS = 4000


class Estimate(NamedTuple):
    """A mean over seeds with its 95 % interval."""

    value: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def over_seeds(outcomes: Sequence[Sequence[float]]) -> Estimate:
    """The mean of the seeds' means, with a bootstrap over seeds and, within each, over its held-out worlds.

    A single seed says nothing of the spread between seeds: of its outcomes 0 and 1 the interval is Wilson's, else
    (differences) that of the worlds alone. Of two or three seeds the interval is too narrow.

    Args: `outcomes`, of every seed the values of its worlds. Raises `ValueError` unless all have as many, one at least.
    """
    if len(counts := {len(each) for each in outcomes}) != 1 or counts == {0}:
        raise ValueError(f"{len(outcomes)} seeds with {sorted(counts)} worlds: every seed needs as many as the others, and one")
    values = np.array([list(each) for each in outcomes], float)
    seeds, worlds = values.shape
    if seeds == 1 and set(values.flat) <= {0.0, 1.0}:
        return Estimate(float(values.mean()), *wilson(float(values.sum()), worlds), 1)
    rng = np.random.default_rng(0)
    drawn = np.zeros(_DRAWS)
    for _ in range(seeds):  # each time a seed, and then so many of its worlds
        seed, chosen = rng.integers(seeds, size=(_DRAWS, 1)), rng.integers(worlds, size=(_DRAWS, worlds))
        drawn += values[seed, chosen].mean(axis=1) / seeds
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(values.mean()), float(low), float(high), seeds)


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact two-sided p of McNemar's test: of paired outcomes, how many only the first and only the second solved."""
    n, least = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(comb(n, i) for i in range(least + 1)) / 2**n)


class Comparison(NamedTuple):
    """One method minus another on the same held-out worlds of the same seeds."""

    difference: Estimate
    only_first: int
    only_second: int

    @property
    def p(self) -> float:
        return mcnemar(self.only_first, self.only_second)


def compare(first: Iterable[Figures], second: Iterable[Figures], mode: str) -> Comparison | None:
    """Two methods on one world, by the seeds that both have; None where they share none."""
    others = {each["seed"]: each["real"][mode]["outcomes"] for each in second}
    pairs = [(each["real"][mode]["outcomes"], others[each["seed"]]) for each in first if each["seed"] in others]
    pairs = [(a, b) for a, b in pairs if len(a) == len(b)]
    if not pairs:
        return None
    both = [(x, y) for a, b in pairs for x, y in zip(a, b, strict=True)]
    difference = over_seeds([[int(x) - int(y) for x, y in zip(a, b, strict=True)] for a, b in pairs])
    return Comparison(difference, both.count(("1", "0")), both.count(("0", "1")))


def steps_until(cell: Figures, success: float) -> int | None:
    """Real training steps behind the first policy of a training in reality whose own episodes succeed as often as `success`.

    That the first such iteration counts, of 64 episodes each, favours the training in reality. None if there is none.
    Raises `KeyError` for figures that were written before the steps of each iteration were kept.
    """
    spent = 0
    for row in cell["training"]:
        if row["train_success"] >= success:
            return spent
        spent += int(row["real_steps"])
    return None


class Saving(NamedTuple):
    """How many times the real steps of one cell training in reality spends until it succeeds as often."""

    times: float
    reached: bool
    """Whether it does; else `times` is a lower bound."""

    def __str__(self) -> str:
        return f"{'' if self.reached else '> '}{self.times:.1f}"


def saving(each: Figures, other: Figures, kinds: Sequence[str]) -> Saving | None:
    """Of a cell against training in reality by the same learner. None where the cell spends no such step.

    Args: `kinds`, the steps that count: `training`, with or without `validation`.
    """
    own, spent = (sum(cell["real_steps"][kind] for kind in kinds) for cell in (each, other))
    if not own:
        return None
    needed = steps_until(other, each["real"]["sampled"]["successes"] / each["real"]["sampled"]["episodes"])
    spent += 0 if needed is None else needed - other["real_steps"]["training"]
    return Saving(spent / own, needed is not None)


def savings_over_seeds(found: Sequence[Saving]) -> str:
    """Their geometric mean and its bootstrap interval over seeds; a lower bound among them makes it one too."""
    logs = np.log([max(each.times, 1e-9) for each in found])
    drawn = logs[np.random.default_rng(0).integers(len(logs), size=(_DRAWS, len(logs)))].mean(axis=1)
    low, high = np.exp(np.quantile(drawn, [0.025, 0.975]))
    mean = Saving(float(np.exp(logs.mean())), all(each.reached for each in found))
    return str(mean) + (f" [{low:.1f}, {high:.1f}]" if len(found) > 1 else "")
