"""What trains a policy, and how much each token of an episode counts in its loss.

A learner is given groups (the episodes of one task) and turns them into rows by its credit. Pure Python: no torch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from dreamgym_lg.types import Segment, Trajectory

Groups = Sequence[Sequence[Trajectory]]
"""The episodes of an iteration, those of one task together."""


class Learner(Protocol):
    """Trains the policy on recorded episodes, durably, e.g. `integrations.trl.grpo.GRPOLearner`."""

    @property
    def iteration(self) -> int:
        """How many iterations' updates are in the weights."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """What the last update returned, also after a restart."""

    def update(self, groups: Groups) -> Mapping[str, float]:
        """Train on one iteration's groups, save, and return metrics."""

    def close(self) -> None:
        """End what runs beside the caller; everything is saved already."""


class TrainingRow(NamedTuple):
    """One segment with what its tokens count in the loss of an iteration.

    The loss is the sum over all sampled tokens of all rows of `weight * loss(token, advantage)`, the KL term included.
    """

    segment: Segment
    advantages: Sequence[float]
    """One per token of the segment; those of tokens that were given, not sampled, are not used."""
    weight: float
    """Of each sampled token, greater than 0."""


class Credit(Protocol):
    """Turns an iteration's groups into training rows: who earned what, and how much it counts."""

    def __call__(self, groups: Groups) -> list[TrainingRow]: ...


Normalisation = Literal["episodes", "tokens", "length"]


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """`(r - mean) / (std + 1e-4)` over one group (GRPO; TRL's `scale_rewards="group"`); zeros for a uniform group."""
    mean = sum(rewards) / len(rewards)
    variance = sum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1)
    return [(reward - mean) / (math.sqrt(variance) + 1e-4) for reward in rewards]


def group_credit(groups: Groups, *, normalise: Normalisation = "episodes", length: int = 1) -> list[TrainingRow]:
    """The rows of group-relative learning: every token of an episode has its episode's advantage within the group.

    How an episode was cut into segments has no influence: its weight is shared by its tokens, not by its segments. Left out
    are failed episodes and those without a sampled token (of the group's mean and deviation too), and uniform groups, which
    carry no signal.

    Args:
        normalise: What all the weights of N episodes with T sampled tokens amount to. `episodes`: each episode weighs 1/N,
            a token of an episode with L of them 1/(N L) (GRPO). `tokens`: each token weighs 1/T (DAPO, BNPO, CISPO).
            `length`: each token weighs 1/(N `length`) (Dr. GRPO; TRL's `max_completion_length`).
    """
    credited: list[tuple[Trajectory, float]] = []
    for group in groups:
        played = [episode for episode in group if episode.error is None and _sampled_tokens(episode)]
        if len({episode.reward for episode in played}) > 1:
            credited += zip(played, group_advantages([episode.reward for episode in played]), strict=True)
    all_tokens = sum(_sampled_tokens(episode) for episode, _ in credited)
    rows = []
    for episode, advantage in credited:
        tokens = {"episodes": len(credited) * _sampled_tokens(episode), "tokens": all_tokens, "length": len(credited) * length}
        rows += [
            TrainingRow(segment, [advantage] * len(segment.token_ids), 1 / tokens[normalise])
            for segment in episode.segments
            if segment.trainable
        ]
    return rows


def _sampled_tokens(episode: Trajectory) -> int:
    return sum(segment.trainable for segment in episode.segments)
