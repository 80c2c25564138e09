"""The credit: what each token of an episode counts in the loss, whatever its episode was cut into."""

import statistics
from collections.abc import Sequence

import pytest

from dreamgym_lg.learner import Normalisation, TrainingRow, group_advantages, group_credit
from dreamgym_lg.types import Segment, Step, Task, Trajectory


def segment(tokens: int, name: int = 7) -> Segment:
    """One given token, then `tokens` sampled ones."""
    sampled = [0] + [1] * tokens
    return Segment(token_ids=[name] * (tokens + 1), sampled=sampled, logprobs=[-1.0 * s for s in sampled], temperature=1.0)


def episode(reward: float, *segments: Segment, error: str | None = None) -> Trajectory:
    step = Step(observation="o", action="a", next_observation="p", reward=reward)
    return Trajectory(task=Task(id="t", instruction="i", environment="e"), steps=[step], segments=segments, error=error)


def weight(rows: Sequence[TrainingRow]) -> float:
    return sum(row.weight * row.segment.trainable for row in rows)


def test_group_advantages_are_the_normalised_rewards() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([0.8658754, -0.8658754, -0.8658754, 0.8658754])
    rewards = [0.0, 0.25, 1.0]
    expected = [(r - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4) for r in rewards]
    assert group_advantages(rewards) == pytest.approx(expected)
    assert group_advantages([0.5, 0.5]) == [0.0, 0.0]
    assert group_advantages([0.5]) == [0.0]


def test_uniform_groups_give_no_rows() -> None:
    uniform = [episode(1.0, segment(2)) for _ in range(3)]
    mixed = [episode(float(i), segment(2)) for i in range(3)]
    assert group_credit([uniform, uniform]) == []
    assert group_credit([uniform, mixed]) == group_credit([mixed]), "nor do they dilute the others"
    assert len(group_credit([mixed])) == 3


def test_failed_episodes_are_left_out_of_the_group() -> None:
    failed = episode(9.0, segment(2, 9), error="PredictionFailed: unreadable")
    rows = group_credit([[episode(0.0, segment(2, 0)), failed, episode(1.0, segment(2, 1))]])
    assert [row.segment.token_ids[0] for row in rows] == [0, 1]
    assert [row.advantages[0] for row in rows] == pytest.approx(group_advantages([0.0, 1.0]))
    assert weight(rows) == pytest.approx(1)
    assert group_credit([[failed, episode(0.0, segment(2)), episode(0.0, segment(2))]]) == []
    assert group_credit([[episode(0.0, segment(2)), episode(1.0)]]) == [], "an episode without tokens cannot be compared"


@pytest.mark.parametrize("normalise", ["episodes", "tokens", "length"])
def test_the_weight_of_an_episode_does_not_depend_on_its_number_of_segments(normalise: Normalisation) -> None:
    whole = group_credit([[episode(0.0, segment(6)), episode(1.0, segment(12))]], normalise=normalise, length=5)
    parts = [segment(1), segment(4), segment(0), segment(7)]
    divided = group_credit([[episode(0.0, segment(6)), episode(1.0, *parts)]], normalise=normalise, length=5)
    assert [row.segment.trainable for row in divided] == [6, 1, 4, 7], "no row without a token to train on"
    assert weight(divided[1:]) == pytest.approx(weight(whole[1:]))
    assert divided[0] == whole[0]
    assert [advantage for row in divided for advantage in set(row.advantages)] == [
        row.advantages[0] for row in (whole[0], *[whole[1]] * 3)
    ]
    assert all(len(row.advantages) == len(row.segment.token_ids) for row in divided)


def test_what_the_weights_amount_to() -> None:
    group = [episode(0.0, segment(6)), episode(1.0, segment(12)), episode(1.0, segment(2), segment(2))]
    assert [row.weight for row in group_credit([group])] == pytest.approx([1 / 18, 1 / 36, 1 / 12, 1 / 12])
    assert [row.weight for row in group_credit([group], normalise="tokens")] == pytest.approx([1 / 22] * 4)
    assert [row.weight for row in group_credit([group], normalise="length", length=100)] == pytest.approx([1 / 300] * 4)
