import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.statistics import Rate, intervals_apart, wilson


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


def test_intervals_apart():
    assert intervals_apart((0.0, 0.04), (0.72, 0.88))
    assert intervals_apart((0.72, 0.88), (0.0, 0.04))
    assert not intervals_apart((0.1, 0.5), (0.4, 0.9))
    assert not intervals_apart((0.1, 0.9), (0.4, 0.5)), "one inside the other"
    assert not intervals_apart((0.1, 0.4), (0.4, 0.9)), "touching"


def test_rate_prints_value_and_interval():
    rate = Rate(94, 120, *wilson(94, 120))

    assert rate.value == 94 / 120
    assert str(rate) == f"{rate}" == "0.78 [0.70, 0.85]"
