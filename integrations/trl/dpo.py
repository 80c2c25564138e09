"""DPO on the better and worse episodes of one task.

Not by TRL's `DPOTrainer`: there a pair is two sequences, of which all tokens after the prompt count. Here an episode may be
several segments, whose log-probabilities have to be added up before the loss is taken, and what the environment said is no
choice of the policy. The loss is the same, of the sampled tokens alone (`preference_credit`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.trl.options import STEP
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.integrations.trl.policy_trainer import LikelihoodTrainer
from dreamgym_lg.learner import Groups, Pair, TrainingRow, preference_credit, preference_pairs, trainable_segments
from dreamgym_lg.types import Segment


class _DPOTrainer(LikelihoodTrainer):
    def log_ratios(self, segments: Sequence[Segment]) -> list[float]:
        """How much more probable the policy makes each segment's sampled tokens than the reference: natural logarithm."""
        found = [0.0] * len(segments)
        self.model.eval()
        for part in self.passes(segments):
            batch = self._batch([TrainingRow(segments[i], [0.0] * len(segments[i].token_ids), 1.0) for i in part])
            more = self.log_probs(self.model, batch) - self.reference_log_probs(batch)
            for i, ratio in zip(part, (more * batch["tool_mask"]).sum(dim=1).tolist(), strict=True):
                found[i] = ratio
        return found

    def note(self, beta: float, margins: Sequence[float]) -> None:
        """Log what TRL's `DPOTrainer` does, by its names; `loss` is the linear one that has the same gradient."""
        rewards = beta * torch.tensor(margins)
        metrics = self._metrics["train"]
        metrics["dpo_loss"].append(torch.nn.functional.softplus(-rewards).mean().item())
        metrics["rewards/margins"].append(rewards.mean().item())
        metrics["rewards/accuracies"].append((rewards > 0).float().mean().item())


class DPOLearner(PolicyLearner):
    """Direct preference optimisation (Rafailov et al. 2023) on pairs of episodes of one task with different rewards.

    The reference is the policy that training began with, also after a restart. All pairs of a group are used once an iteration:
    the best with the worst, the second best with the second worst.

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
        self._trainer.note(self._beta, margins)
        return preference_credit(parts, margins, beta=self._beta)
