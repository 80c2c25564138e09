"""GRPO and DPO, and all learners by their names. PPO has a file of its own."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.trl.options import CLIPPING, STEP
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.integrations.trl.ppo import PPOLearner
from dreamgym_lg.learner import (
    Groups,
    LearnerName,
    Normalisation,
    Pair,
    TrainingRow,
    group_credit,
    preference_credit,
    preference_pairs,
    trainable_segments,
    with_observations,
)

LOSS_TYPES: Mapping[str, Normalisation] = {
    "grpo": "episodes",
    "dapo": "tokens",
    "bnpo": "tokens",
    "cispo": "tokens",
}
"""The `loss_type`s of TRL that `GRPOLearner` has, with the normalisation that each amounts to (`group_credit`).

TRL's others have a mean or a ratio per row, and an episode may be several rows."""


class GRPOLearner(PolicyLearner):
    """Group-relative policy optimisation (Shao et al. 2024) by TRL's loss types.

    Args:
        loss_type: One of `LOSS_TYPES`.
        step_credit: Compare each reply with those to the same tokens (`group_credit`, `by_state`), not episodes as wholes.
        echo: Coefficient, at least 0, of the cross-entropy of observations (`with_observations`), e.g. 0.05.
        options: Of `PolicyLearner`, and those of `StepOptions` about clipping.

    Raises `ConfigurationError` as `PolicyLearner` does, for an unknown loss type and a negative `echo`.
    """

    OPTIONS = STEP | CLIPPING
    COMPARES = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str | Path,
        *,
        loss_type: str = "grpo",
        step_credit: bool = False,
        echo: float = 0.0,
        **options: Any,
    ) -> None:
        if loss_type not in LOSS_TYPES:
            raise ConfigurationError.unknown("loss_type", loss_type, LOSS_TYPES)
        if echo < 0:
            raise ConfigurationError(f"echo={echo}: give a coefficient of at least 0, e.g. 0.05")
        self._echo = echo
        self._decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self.loss = "cispo" if loss_type == "cispo" else "clipped"
        self._credit = partial(group_credit, normalise=LOSS_TYPES[loss_type], by_state=step_credit)
        super().__init__(model, tokenizer, path, **options)

    def _parts(self, groups: Groups) -> Sequence[TrainingRow]:
        rows = self._credit(groups)
        return with_observations(rows, groups, coefficient=self._echo, decode=self._decode) if self._echo else rows

    def _rows(self, parts: Sequence[TrainingRow]) -> tuple[Sequence[TrainingRow], dict[str, float]]:
        return parts, {"echo_tokens": float(sum(each > 0 for row in parts for each in row.observed))} if self._echo else {}


class DPOLearner(PolicyLearner):
    """Direct preference optimisation (Rafailov et al. 2023) on pairs of episodes of one task with different rewards.

    The reference is the policy that training began with, also after a restart. All pairs of a group are used once an iteration:
    the best with the worst, the second best with the second worst.

    Unlike in TRL's `DPOTrainer`, an episode may be several segments, and only what the policy sampled counts.

    Args: As of `PolicyLearner`. `beta`: how strongly the policy is held to the reference, above 0; default 0.1.
    """

    OPTIONS = STEP
    loss = "likelihood"
    BETA = 0.1
    COMPARES = True

    @property
    def kl_weight(self) -> float:
        if self.beta <= 0:
            raise ConfigurationError(f"beta={self.beta}: DPO learns nothing with it; give a number above 0, e.g. 0.1")
        return 0.0  # the reference is in the margins

    def _parts(self, groups: Groups) -> Sequence[Pair]:
        return preference_pairs(groups)

    def _rows(self, parts: Sequence[Pair]) -> tuple[list[TrainingRow], dict[str, float]]:
        """Metrics are those of TRL's `DPOTrainer`. `loss` is the linear one that has the same gradient."""
        episodes = [episode for pair in parts for episode in (pair.chosen, pair.rejected)]
        ratios = iter(self._trainer.log_ratios([segment for episode in episodes for segment in trainable_segments(episode)]))
        totals = iter([sum(next(ratios) for _ in trainable_segments(episode)) for episode in episodes])
        margins = [next(totals) - next(totals) for _ in parts]
        rewards = self.beta * torch.tensor(margins)
        metrics = {
            "dpo_loss": torch.nn.functional.softplus(-rewards).mean().item(),
            "rewards/margins": rewards.mean().item(),
            "rewards/accuracies": (rewards > 0).float().mean().item(),
        }
        return preference_credit(parts, margins, beta=self.beta), metrics


LEARNERS: Mapping[LearnerName, type[PolicyLearner]] = {
    "grpo": GRPOLearner,
    "ppo": PPOLearner,
    "dpo": DPOLearner,
}
"""The learners by the names that `Settings.learner` and `dreamgym train --learner` take."""
