"""The test behind a canary: how soon it ends a worse policy, how rarely a good one, under any delay of outcomes."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from dreamgym_lg.production import CanaryLog
from dreamgym_lg.production.evidence import (
    Evidence,
    block_sizes,
    canary_evidence,
    evidence_by_prefix,
    in_blocks,
    lower_rate_evidence,
)

Delay = Callable[[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]], NDArray[np.float64]]
"""(thread numbers, served by the policy, success) -> threads that start until the outcome is recorded; inf: never."""

DELAYS: dict[str, Delay] = {
    "none": lambda number, policy, success: np.zeros(len(number)),
    "failures at once, successes 300 later": lambda number, policy, success: np.where(success, 300, 0),
    "failures at once, successes 1,000 later": lambda number, policy, success: np.where(success, 1000, 0),
    "the policy's failures at once, all else later": lambda number, policy, success: np.where(policy & ~success, 0, 500),
    "production's successes at once, the policy's never": lambda number, policy, success: np.where(policy & success, np.inf, 0),
    "the worst first": lambda number, policy, success: np.where(policy != success, 0, 2000),
}


def canaries(policy: float, production: float, share: float, delay: Delay, *, experiments: int = 1000) -> list[float]:
    """The shares of canaries that end as worse, and that are said to be better, by 800 threads and three looks.

    Once known, an outcome can only raise the evidence: the last look, when all outcomes are in that ever come, finds what any
    look before it finds.
    """
    rng, number = np.random.default_rng(1), np.arange(800)
    by_policy = rng.random(800) < share
    blocks = in_blocks(["policy" if each else "production" for each in by_policy], block_sizes(share))
    closed = np.max([side.max(axis=1) for side in blocks.values()], axis=0)
    success = rng.random((experiments, 800)) < np.where(by_policy, policy, production)
    recorded, decided = number + delay(number, by_policy, success), np.zeros((2, experiments), bool)
    for now in (400, 799, 10**6):
        started = {side: rows[closed <= now] for side, rows in blocks.items()}
        evidence = evidence_by_prefix(np.where(recorded <= now, success, np.nan), started)
        earlier, decided = decided, np.array([claim.max(axis=1) >= 20 for claim in evidence]) | decided
        assert (decided >= earlier).all()
    return [float(claim.mean()) for claim in decided]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
def test_no_delay_ends_a_policy_that_is_as_good(delay: Delay, share: float) -> None:
    """Both sides succeed at 80 %: at most alpha of the canaries may end, or be said better (1,000 each, 12,000 in all)."""
    assert max(canaries(0.8, 0.8, share, delay)) <= 0.05


@pytest.mark.parametrize("delay", [DELAYS["none"], DELAYS["failures at once, successes 300 later"]])
def test_a_worse_policy_is_found_under_a_delay_too(delay: Delay) -> None:
    worse, better = canaries(0.3, 0.8, 0.1, delay, experiments=100)
    assert worse >= 0.98 and better == 0


@pytest.mark.slow
def test_what_is_recorded_first_does_not_end_a_canary(tmp_path) -> None:
    """As in production: failures raise at once, successes are recorded 300 threads later; both sides fail at 20 %."""
    for seed in range(2):
        log, rng, waiting = CanaryLog(tmp_path / f"{seed}.db"), np.random.default_rng(seed), list[str]()
        log.begin("v2", policy_version="p", share=0.5, alpha=0.05)
        for number in range(500):
            log.choose("v2", str(number))
            if rng.random() < 0.2:
                log.add_error("v2", str(number))
            else:
                waiting.append(str(number))
            if len(waiting) > 240:
                log.record_outcome(waiting.pop(0), True)
        assert log.state().ended is None
        for thread in waiting:
            log.record_outcome(thread, True)
        assert log.state().ended is None and all(side.waiting == 0 for side in log.state().served.values())


# --- the evidence itself ------------------------------------------------------------------------------------------------------


def looks(first: float, second: float, others: int, *, experiments: int, blocks: int) -> tuple[NDArray[np.float64], ...]:
    """The e-values of many canaries after each block of one trial of the first side and `others` of the second."""
    rng, numbers = np.random.default_rng(0), np.arange(1.0, blocks + 1)
    won = rng.binomial(1, first, (experiments, blocks)).cumsum(axis=1).astype(float)
    others_won = rng.binomial(others, second, (experiments, blocks)).cumsum(axis=1).astype(float)
    sides = [((one, numbers), (two, others * numbers)) for one, two in zip(won, others_won, strict=True)]
    worse = np.array([lower_rate_evidence(*each) for each in sides])
    return worse, np.array([lower_rate_evidence(*each[::-1]) for each in sides])


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "others"), [(0.05, 9), (0.5, 1), (0.8, 9), (0.95, 3)])
def test_a_canary_as_good_as_production_is_rarely_ended_though_looked_at_all_the_time(rate: float, others: int) -> None:
    """At most alpha, 0.05, by Ville's inequality; that of a test at every look would be several times that."""
    for evidence in looks(rate, rate, others, experiments=600, blocks=120):
        assert (evidence >= 20).any(axis=1).mean() <= 0.05


@pytest.mark.slow
def test_a_better_canary_is_ended_even_less() -> None:
    worse, better = looks(0.9, 0.8, 9, experiments=500, blocks=100)
    assert (worse >= 20).any(axis=1).mean() <= 0.01 < (better >= 20).any(axis=1).mean()


@pytest.mark.parametrize(("first", "half_by"), [(0.0, 5), (0.2, 8), (0.5, 32)])
def test_a_worse_canary_is_ended_soon(first: float, half_by: int) -> None:
    worse, better = looks(first, 0.8, 9, experiments=300, blocks=120)
    reached = worse >= 20
    assert reached[:, half_by - 1].mean() >= 0.5 and reached.any(axis=1).mean() >= 0.99
    assert not (better >= 20).any()


def test_an_unknown_outcome_counts_against_either_claim() -> None:
    sides = ["policy", "production"] * 40
    blocks, policy = in_blocks(sides, (1, 1)), np.arange(80) % 2 == 0  # type: ignore[arg-type]
    known = canary_evidence(np.where(policy, 0, 1), blocks)
    assert known.worse > 20 and known.better == 1
    unknown = canary_evidence(np.full(80, np.nan), blocks)
    assert unknown == Evidence(1, 1)
    half = np.where(np.arange(80) < 40, np.where(policy, 0, 1), np.nan)
    assert 20 < canary_evidence(half, blocks).worse < known.worse
    assert canary_evidence([], in_blocks([], (1, 9))) == Evidence(1, 1)
    large = np.tile([0.0, 1.0], 10**5)
    assert np.isfinite(canary_evidence(large, in_blocks(["policy", "production"] * 10**5, (1, 1)))).all()


@pytest.mark.parametrize(("share", "sizes"), [(0.05, (1, 9)), (0.2, (1, 4)), (0.5, (1, 1)), (0.8, (4, 1)), (1.0, (1, 1))])
def test_blocks_hold_nearly_all_threads_of_the_rarer_side_and_are_of_one_time(share: float, sizes: tuple[int, int]) -> None:
    assert block_sizes(share) == sizes
    by_policy = np.random.default_rng(1).random(3000) < share
    blocks = in_blocks(["policy" if each else "production" for each in by_policy], sizes)
    counts = len(blocks["policy"])
    assert len(blocks["production"]) == counts
    fewest = min((by_policy == side).sum() // size for side, size in zip((True, False), sizes, strict=True))
    assert 0.9 * fewest <= counts <= fewest
    for side, rows in blocks.items():
        assert len(np.unique(rows)) == rows.size and (by_policy[rows] == (side == "policy")).all()


def test_of_a_side_that_is_far_ahead_the_oldest_threads_are_left_out() -> None:
    """Production succeeded in old times, and fails now as the policy does: the policy is not to blame."""
    blocks = in_blocks([*["production"] * 200, *["policy"] * 200], (1, 1))
    assert len(blocks["policy"]) == 20 and blocks["production"].min() == 180
