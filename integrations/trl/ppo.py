"""PPO: TRL's clipped loss with the advantages of a critic, which TRL has no more.

The critic is one linear layer on the last hidden state of the policy's own model. It is in the checkpoints of a training, and
nowhere else: a policy that is saved for use has none.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.trl.options import CLIPPING, STEP
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.integrations.trl.token_trainer import Batch, Figures, Scores, TokenTrainer
from dreamgym_lg.learner import gae_credit, sft_row
from dreamgym_lg.types import Segment

_CRITIC_RATE_FACTOR = 10
"""The critic's learning rate over the policy's (1e-5 over 1e-6 in the paper)."""


def clipped_value_loss(values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """`max((v - R)^2, (clip(v, v_before +- clip) - R)^2) / 2`, elementwise."""
    near = before + (values - before).clamp(-clip, clip)
    return torch.max((values - returns) ** 2, (near - returns) ** 2) / 2


class _PPOTrainer(TokenTrainer):
    def __init__(self, *args: Any, value_coef: float, value_clip: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._coef, self._clip = value_coef, value_clip
        head = torch.nn.Linear(self.model.config.get_text_config().hidden_size, 1)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        self.critic = head.to(self.model.device)
        rate = _CRITIC_RATE_FACTOR * self.options.learning_rate
        self.optimizer.add_param_group({"params": list(head.parameters()), "lr": rate, "weight_decay": 0.0})

    @torch.no_grad()
    def values(self, segments: Sequence[Segment]) -> list[list[float]]:
        """The expected reward before each token of each segment (a `Critic`). 0 before those that were not sampled."""
        expected = [[0.0] * len(segment.token_ids) for segment in segments]
        self.model.eval()
        with self.sharing(segments):
            for part in self.passes(segments):
                batch = self.batch([sft_row(segments[i]) for i in part])
                values = iter(self._expected(self.forward(batch)).tolist())
                for i in part:
                    expected[i] = [next(values) if own else 0.0 for own in segments[i].sampled]
        return expected

    def _expected(self, scores: Scores) -> torch.Tensor:
        """The expected reward before each scored token."""
        return self.critic(scores.hidden.float()).squeeze(-1)

    def other_loss(self, batch: Batch, scores: Scores) -> tuple[torch.Tensor, Figures]:
        losses = clipped_value_loss(self._expected(scores), batch.values, batch.returns, self._clip)
        return self._coef * (losses * batch.weights).sum(), {"value_loss": losses.detach()}


class PPOLearner(PolicyLearner):
    """Proximal policy optimisation (Schulman et al. 2017): every sampled token is an action (`gae_credit`).

    An iteration whose episodes all earned the same is skipped. A group may be a single episode.

    Args:
        gamma: Discount from one token of an episode to the next, above 0, at most 1.
        gae_lambda: 0 to 1; below 1 the critic's expectations after the next tokens stand for the rest of the episode, which
            means little as long as it has learned nothing.
        value_coef: Coefficient of the critic's loss; its gradient reaches the policy's model too.
        value_clip: How far from its expectation before the update the critic is moved at most, above 0.
        options: Of `PolicyLearner`, and those of `StepOptions` about clipping.

    Raises `ConfigurationError` as `PolicyLearner` does, and for a number outside of its range.
    """

    OPTIONS = STEP | CLIPPING
    _trainer: _PPOTrainer

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        path: str | Path,
        *,
        gamma: float = 1.0,
        gae_lambda: float = 1.0,
        value_coef: float = 0.1,
        value_clip: float = 0.2,
        **options: Any,
    ) -> None:
        for name, value, valid in (
            ("gamma", gamma, 0 < gamma <= 1),
            ("gae_lambda", gae_lambda, 0 <= gae_lambda <= 1),
            ("value_coef", value_coef, value_coef >= 0),
            ("value_clip", value_clip, value_clip > 0),
        ):
            if not valid:
                raise ConfigurationError(f"{name}={value} is outside of its range; see PPOLearner's docstring")
        self.trainer = partial(_PPOTrainer, value_coef=value_coef, value_clip=value_clip)
        super().__init__(model, tokenizer, path, **options)
        self._credit = partial(gae_credit, critic=self._trainer.values, gamma=gamma, gae_lambda=gae_lambda)
