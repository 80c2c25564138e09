"""The rows that a group-relative learner trains on: token segments with their episode's advantage."""

import math
from collections.abc import Sequence

from dreamgym_lg.types import Segment, Trajectory

Rows = list[tuple[Segment, float]]
"""Token segments, each with the advantage of its episode."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """`(r - mean) / (std + 1e-4)` over one group (GRPO; TRL's `scale_rewards="group"`); zeros for a uniform group."""
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1)
    return [(reward - mean) / (math.sqrt(variance) + 1e-4) for reward in rewards]


def to_rows(groups: Sequence[Sequence[Trajectory]]) -> Rows:
    """The training rows of an iteration. Uniform groups carry no signal and give none.

    An episode of S segments gives S rows with its advantage divided by S: the loss averages over rows, so that an episode
    with more segments does not weigh more. Failed rollouts are left out of their group, mean and deviation.
    """
    rows: Rows = []
    for group in groups:
        played = [trajectory for trajectory in group if trajectory.error is None and trajectory.segments]
        if len({trajectory.reward for trajectory in played}) < 2:
            continue
        advantages = group_advantages([trajectory.reward for trajectory in played])
        for trajectory, advantage in zip(played, advantages, strict=True):
            rows += [(segment, advantage / len(trajectory.segments)) for segment in trajectory.segments]
    return rows
