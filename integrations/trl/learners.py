"""GRPO, RLOO, RFT and DPO, and all learners by their names; PPO has a file of its own."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.trl.options import CLIPPING, STEP
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.integrations.trl.policy_trainer import LikelihoodTrainer
from dreamgym_lg.integrations.trl.ppo import PPOLearner
from dreamgym_lg.learner import (
    Groups,
    LearnerName,
    Normalisation,
    Pair,
    TrainingRow,
    group_credit,
    leave_one_out_advantages,
    preference_credit,
    preference_pairs,
    success_credit,
    trainable_segments,
)
from dreamgym_lg.types import Segment

LOSS_TYPES: Mapping[str, Normalisation] = {
    "grpo": "episodes",
    "dapo": "tokens",
    "bnpo": "tokens",
    "cispo": "tokens",
    "dr_grpo": "length",
}
"""The `loss_type`s of TRL that `GRPOLearner` has, with the normalisation that each amounts to (`group_credit`).

TRL's others have a mean or a ratio per row, and an episode may be several rows."""


class GRPOLearner(PolicyLearner):
    """Group-relative policy optimisation (Shao et al. 2024) by TRL's loss types.

    A reply is compared with episodes that replied when they had earned as much (`dreamgym_lg.learner.group_credit`): where all
    reward comes at the end, these are the group.

    Args:
        loss_type: One of `LOSS_TYPES`. With `dr_grpo`, `max_completion_length` is its constant.
        options: Of `PolicyLearner`, and of `GRPOConfig`: `epsilon`, `epsilon_high`, `delta`, `use_bias_correction_kl`,
            `vllm_importance_sampling_correction`, `vllm_importance_sampling_clip_max`.

    Raises `ConfigurationError` as `PolicyLearner` does, and for an unknown loss type.
    """

    OPTIONS = STEP | CLIPPING | {"loss_type", "max_completion_length"}

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str | Path,
        *,
        loss_type: str = "grpo",
        **options: Any,
    ) -> None:
        _check_loss_type(loss_type, options)
        length = options.pop("max_completion_length", GRPOConfig.max_completion_length)
        # TRL's dapo is the plain sum over all tokens; the weights of the rows make any other normalisation of it
        self.loss = {"loss_type": "cispo" if loss_type == "cispo" else "dapo"}
        self._credit = partial(group_credit, normalise=LOSS_TYPES[loss_type], length=length)
        super().__init__(model, tokenizer, path, **options)


def _check_loss_type(loss_type: str, options: Mapping[str, object]) -> None:
    if loss_type not in LOSS_TYPES:
        raise ConfigurationError.unknown("loss_type", loss_type, LOSS_TYPES)
    if "max_completion_length" in options and loss_type != "dr_grpo":
        raise ConfigurationError(
            f"max_completion_length is the constant of loss_type='dr_grpo' and has no effect with {loss_type!r}; the policy's "
            "own max_new_tokens limits its replies"
        )


class RLOOLearner(PolicyLearner):
    """REINFORCE leave-one-out (Ahmadian et al. 2024): rewards are not divided by the group's deviation.

    Each of an episode's tokens weighs the same however long it is, so that with one optimiser step an iteration, and where all
    reward comes at the end, the gradient is the policy gradient of the reward itself. TRL's own `RLOOTrainer` has one ratio per
    sequence, and an episode may be several: here it is clipped per token, as in GRPO, and the KL term is in the loss, not in
    the reward.

    Args: As of `GRPOLearner`, without `loss_type` and `max_completion_length`.
    """

    OPTIONS = STEP | CLIPPING
    _credit = staticmethod(partial(group_credit, advantages=leave_one_out_advantages, normalise="length"))


class RFTLearner(PolicyLearner):
    """Rejection-sampling fine-tuning: the mean negative log-likelihood of the sampled tokens of an iteration's successes.

    An iteration without a success is skipped; one whose episodes all succeed is not.

    Args: As of `PolicyLearner`. `learning_rate`: default for a model of more than 50 M parameters 1e-5. `beta`: default 0.
    """

    OPTIONS = STEP
    trainer = LikelihoodTrainer
    loss = LikelihoodTrainer.LOSS
    BETA = 0.0
    LARGE_RATE = 1e-5
    _credit = staticmethod(success_credit)


class _DPOTrainer(LikelihoodTrainer):
    def log_ratios(self, segments: Sequence[Segment]) -> list[float]:
        """Of each segment's sampled tokens together: log-probability under the policy minus the reference's."""
        ratios = [0.0] * len(segments)
        self.model.eval()
        for part in self.passes(segments):
            batch = self._batch([TrainingRow(segments[i], [0.0] * len(segments[i].token_ids), 1.0) for i in part])
            more = self.log_probs(self.model, batch) - self.reference_log_probs(batch)
            for i, ratio in zip(part, (more * batch["tool_mask"]).sum(dim=1).tolist(), strict=True):
                ratios[i] = ratio
        return ratios

    def log_preferences(self, beta: float, margins: Sequence[float]) -> None:
        """Log the metrics of TRL's `DPOTrainer` by its names; `loss` is the linear one that has the same gradient."""
        rewards = beta * torch.tensor(margins)
        metrics = self._metrics["train"]
        metrics["dpo_loss"].append(torch.nn.functional.softplus(-rewards).mean().item())
        metrics["rewards/margins"].append(rewards.mean().item())
        metrics["rewards/accuracies"].append((rewards > 0).float().mean().item())


class DPOLearner(PolicyLearner):
    """Direct preference optimisation (Rafailov et al. 2023) on pairs of episodes of one task with different rewards.

    The reference is the policy that training began with, also after a restart. All pairs of a group are used once an iteration:
    the best with the worst, the second best with the second worst.

    TRL's `DPOTrainer` takes a pair as two sequences, of which all tokens after the prompt count. Here an episode may be several
    segments, whose log-probabilities are added up before the loss is taken, and observations are no choice of the policy.

    Args: As of `PolicyLearner`. `beta`: how strongly the policy is held to the reference, above 0; default 0.1.
    """

    OPTIONS = STEP
    trainer = _DPOTrainer
    loss = LikelihoodTrainer.LOSS
    BETA = 0.1
    _trainer: _DPOTrainer

    def _create_trainer(self, config: dict[str, Any]) -> _DPOTrainer:
        if config["beta"] <= 0:
            raise ConfigurationError(f"beta={config['beta']}: DPO learns nothing with it; give a number above 0, e.g. 0.1")
        trainer = super()._create_trainer(config)
        assert isinstance(trainer, _DPOTrainer)
        self._beta, trainer.beta = trainer.beta, 0.0  # the reference is in the margins; no KL term comes to it
        return trainer

    def _parts(self, groups: Groups) -> Sequence[Pair]:
        return preference_pairs(groups)

    def _rows(self, parts: Sequence[Pair]) -> list[TrainingRow]:
        episodes = [episode for pair in parts for episode in (pair.chosen, pair.rejected)]
        ratios = iter(self._trainer.log_ratios([segment for episode in episodes for segment in trainable_segments(episode)]))
        totals = iter([sum(next(ratios) for _ in trainable_segments(episode)) for episode in episodes])
        margins = [next(totals) - next(totals) for _ in parts]
        self._trainer.log_preferences(self._beta, margins)
        return preference_credit(parts, margins, beta=self._beta)


LEARNERS: Mapping[LearnerName, type[PolicyLearner]] = {
    "grpo": GRPOLearner,
    "rloo": RLOOLearner,
    "ppo": PPOLearner,
    "rft": RFTLearner,
    "dpo": DPOLearner,
}
"""The learners by the names that `Settings.learner` and `dreamgym train --learner` take."""
