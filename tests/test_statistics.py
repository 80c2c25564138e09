import random

import numpy as np
import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.statistics import (
    FEW_EPISODES,
    Rate,
    clustered_interval,
    clustered_rate,
    paired_interval,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_published_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_without_a_trial_knows_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("n", [1, 3, 7, 120, 5000])
def test_wilson_ends_are_exact_and_mirrored(n):
    assert wilson(0, n)[0] == 0.0
    assert wilson(n, n)[1] == 1.0
    for successes in {0, 1, n // 2, n}:
        low, high = wilson(successes, n)
        assert 0 <= low <= successes / n <= high <= 1
        assert wilson(n - successes, n) == pytest.approx((1 - high, 1 - low))


def test_wilson_narrows_with_trials_and_widens_with_z():
    def width(interval):
        return interval[1] - interval[0]

    assert width(wilson(80, 100)) < width(wilson(8, 10))
    assert width(wilson(8, 10, z=2.58)) > width(wilson(8, 10))


@pytest.mark.parametrize(("successes", "n"), [(-1, 5), (6, 5), (0, -1)])
def test_wilson_refuses_impossible_counts(successes, n):
    with pytest.raises(ConfigurationError, match="between 0 and n"):
        wilson(successes, n)


def drawn(rng, episodes, rate, alike):
    """Episodes of 5 to 14 steps, each episode with its own chance of a right one (beta); `alike` is their correlation."""
    chances = rng.beta(rate * (1 / alike - 1), (1 - rate) * (1 / alike - 1), size=episodes)
    return [(rng.random(rng.integers(5, 15)) < chance).tolist() for chance in chances]


@pytest.mark.parametrize(("episodes", "rate"), [(5, 0.8), (10, 0.5), (20, 0.8), (50, 0.95)])
def test_clustered_intervals_hold_the_true_rate_where_independent_steps_do_not(episodes, rate):
    rng, trials, naive, clustered = np.random.default_rng(7), 300, 0, 0
    for _ in range(trials):
        steps = drawn(rng, episodes, rate, alike=0.4)
        low, high = wilson(sum(map(sum, steps)), sum(map(len, steps)))
        naive += low <= rate <= high
        low, high = clustered_interval(steps)
        assert 0 <= low < high <= 1
        clustered += low <= rate <= high
    assert naive / trials < 0.75, "steps of one episode are not independent"
    assert clustered / trials >= 0.89


def test_a_clustered_interval_is_that_of_the_mean_over_steps_and_always_the_same():
    steps = drawn(np.random.default_rng(1), 40, 0.7, alike=0.3)
    low, high = clustered_interval(steps)
    value = sum(map(sum, steps)) / sum(map(len, steps))
    assert low < value < high and (low, high) == clustered_interval([*steps, []])


def test_steps_that_agree_across_episodes_get_no_interval_below_wilsons():
    steps = [[True, False]] * 30  # every episode has the same share: there is no spread at all
    assert clustered_interval(steps) == wilson(15, 30)
    mixed = [[True, True, False, False], [True, False, False, False], [True, True, True, False]] * 10
    low, high = clustered_interval(mixed)
    wide = wilson(60, 120)
    assert low <= wide[0] and high >= wide[1]


@pytest.mark.parametrize(("outcome", "successes"), [(True, 1), (False, 0)])
@pytest.mark.parametrize("episodes", [1, 2, FEW_EPISODES, 60])
def test_without_spread_the_number_of_episodes_is_the_sample_size(outcome, successes, episodes):
    low, high = clustered_interval([[outcome] * 25] * episodes)
    assert (low, high) == pytest.approx(wilson(successes * episodes, episodes)) and high - low > 0.05


def test_few_episodes_get_wilsons_interval_for_so_many_trials():
    few = [[True] * 9 + [False], [False] * 10, [True] * 10]
    assert clustered_interval(few) == pytest.approx(wilson(3 * 19 / 30, 3))
    assert clustered_interval([]) == clustered_interval([[]]) == (0.0, 1.0)


def test_one_step_an_episode_is_the_ordinary_interval():
    assert clustered_interval([[True]] * 8 + [[False]] * 12) == wilson(8, 20)


def test_rate_prints_value_and_interval():
    rate = Rate(94, 120, *wilson(94, 120))

    assert rate.value == 94 / 120
    assert str(rate) == f"{rate}" == "0.78 [0.70, 0.85]"


def test_intervals_over_several_episodes_of_a_task_hold_the_truth_as_often_as_they_say() -> None:
    """Eight episodes a task, of tasks that are easy or hard: Wilson's interval over all episodes covers 0.65 of the time."""
    rng, covered, naive = random.Random(0), 0, 0
    for _ in range(300):
        tasks = [(str(number), rng.choice((0.1, 0.9))) for number in range(30)]
        played = [(task, rng.random() < easy) for task, easy in tasks for _ in range(8)]
        clustered, independent = clustered_rate(played), Rate.of(sum(won for _, won in played), len(played))
        assert clustered and clustered[:2] == independent[:2]
        covered += clustered.low <= 0.5 <= clustered.high
        naive += independent.low <= 0.5 <= independent.high
    assert covered >= 0.92 * 300 > 0.75 * 300 > naive
    assert clustered_rate([]) is None


@pytest.mark.parametrize(("a", "b", "both"), [(0.7, 0.7, 0.0), (0.6, 0.6, 0.3), (0.9, 0.9, 0.1)])
def test_paired_intervals_hold_the_truth_as_often_as_they_say(a: float, b: float, both: float) -> None:
    rng, covered = random.Random(1), 0
    for _ in range(1000):
        pairs = []
        for _ in range(60):
            same = rng.random()  # with the probability `both` the two policies share their luck
            one = rng.random()
            other = one if same < both else rng.random()
            pairs.append((one < a, other < b))
        low, high = paired_interval(pairs)
        covered += low <= a - b <= high
    assert covered >= 940
    low, high = paired_interval([(True, True)] * 10)
    assert low < 0 < high and paired_interval([(True, False)] * 30)[0] > 0.8
