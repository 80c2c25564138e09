"""The test of a canary, over blocks of threads in the order of their start."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Side = Literal["policy", "production"]
SIDES: tuple[Side, Side] = ("policy", "production")
Blocks = Mapping[Side, NDArray[np.int64]]
"""Indices into the threads of each side in order of start. Arrays (blocks, threads of that side in a block)."""

MAX_BLOCK_SIZE = 9
_BLOCKS_WAITING = 20
"""Blocks of a side's newest threads that wait for the other side. A block is of one time."""
_MAX_PREFIXES = 64
_RATES = 1 / (1 + np.exp(-np.linspace(-4.6, 4.6, 24)))
_LOWER, _HIGHER = (_RATES[indices] for indices in np.triu_indices(24, 1))
"""Pairs of a lower and a higher rate between 1 % and 99 %. The alternatives of the test."""
_MAX_LOG = 600.0
"""Keeps `exp` finite."""
Counts = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Successes and trials of one side, after each number of blocks."""


class Evidence(NamedTuple):
    """E-values of two claims about the policy's success rate: 1 says nothing, 20 a lot.

    If the policy is at least as good as production, `worse` reaches 1/alpha at any time with a probability of alpha at most,
    however often one looks. So does `better` if it is at most as good.
    """

    worse: float
    better: float


def block_sizes(share: float) -> tuple[int, int]:
    """Threads of policy and production in a block, near the ratio of their numbers."""
    ratio = (1 - share) / share if 0 < share < 1 else 1.0
    larger = min(max(int(max(ratio, 1 / ratio)), 1), MAX_BLOCK_SIZE)
    return (1, larger) if ratio >= 1 else (larger, 1)


def in_blocks(sides: Sequence[Side], sizes: tuple[int, int]) -> Blocks:
    """Put threads, in order of their starts, into blocks. Outcomes have no say in it.

    A block is closed as soon as both sides have enough threads for it, with the newest of each.
    """
    lengths = dict(zip(SIDES, sizes, strict=True))
    waiting = {side: deque[int](maxlen=size * _BLOCKS_WAITING) for side, size in lengths.items()}
    blocks: dict[Side, list[list[int]]] = {side: [] for side in SIDES}
    for index, side in enumerate(sides):
        waiting[side].append(index)
        if all(len(waiting[each]) >= size for each, size in lengths.items()):
            for each, size in lengths.items():
                blocks[each].append([waiting[each].pop() for _ in range(size)])
    return {side: np.array(blocks[side], int).reshape(-1, size) for side, size in lengths.items()}


def canary_evidence(outcomes: ArrayLike, blocks: Blocks) -> Evidence:
    """The largest evidence of any number of first blocks.

    An outcome that is not known yet counts against the claim: for `worse` as a success of the policy and a failure of
    production, for `better` the other way round. So no order, delay or loss of outcomes can raise the evidence above that of
    all outcomes, and its promise holds.

    Args: `outcomes`, in order of start: 1, 0, or nan for an unknown one.
    """
    if not len(blocks["policy"]):
        return Evidence(1.0, 1.0)
    worse, better = evidence_by_prefix(outcomes, blocks)
    return Evidence(float(max(1, worse.max())), float(max(1, better.max())))


def evidence_by_prefix(outcomes: ArrayLike, blocks: Blocks) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`worse` and `better` after at most 64 numbers of first blocks, the last of all.

    Args: `outcomes`, (..., threads), as of `canary_evidence`. Returns two arrays (..., numbers of blocks).
    """
    values, count = np.asarray(outcomes, float), len(blocks["policy"])
    ends = np.unique(np.linspace(1, count, min(count, _MAX_PREFIXES)).astype(int))

    def counts(side: Side, unknown: float) -> Counts:
        successes = np.nan_to_num(values, nan=unknown)[..., blocks[side]].sum(axis=-1).cumsum(axis=-1)[..., ends - 1]
        return successes, ends * float(blocks[side].shape[1])

    worse = lower_rate_evidence(counts("policy", 1), counts("production", 0))
    return worse, lower_rate_evidence(counts("production", 1), counts("policy", 0))


def lower_rate_evidence(first: Counts, second: Counts) -> NDArray[np.float64]:
    """E-values against "the first rate is not lower", after each number of blocks.

    A block is an e-variable of Turner, Ly and Grünwald (2024, Generic E-variables for exact sequential k-sample tests that
    allow for optional stopping, J. Stat. Plan. Inference 230). Their product is averaged over a grid of alternatives
    (Robbins' method of mixtures).
    """
    (won, trials), (others_won, others_trials) = ([n[..., None] for n in side] for side in (first, second))
    between = (trials * _LOWER + others_trials * _HIGHER) / (trials + others_trials)
    failure, others_failure = np.log((1 - _LOWER) / (1 - between)), np.log((1 - _HIGHER) / (1 - between))
    logs = won * (np.log(_LOWER / between) - failure)
    logs += others_won * (np.log(_HIGHER / between) - others_failure)
    logs += trials * failure + others_trials * others_failure
    np.exp(np.minimum(logs, _MAX_LOG, out=logs), out=logs)
    values: NDArray[np.float64] = logs.mean(axis=-1)
    return values
