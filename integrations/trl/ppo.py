"""PPO: TRL's clipped loss with the advantages of a critic, which TRL has no more.

The critic is one linear layer on the last hidden state of the policy's own model. Its weights are in `value_head.pt` beside the
policy's in every checkpoint, and nowhere else: a policy that is saved for use has none.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.utils import pad

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.trl.options import CLIPPING, STEP
from dreamgym_lg.integrations.trl.policy_learner import PolicyLearner
from dreamgym_lg.integrations.trl.policy_trainer import PolicyTrainer, backbone
from dreamgym_lg.learner import TrainingRow, gae_credit
from dreamgym_lg.types import Segment

_FILE = "value_head.pt"
_CRITIC_RATE_FACTOR = 10
"""The critic's learning rate over the policy's (1e-5 over 1e-6 in the paper)."""


def clipped_value_loss(values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """`max((v - R)^2, (clip(v, v_before +- clip) - R)^2) / 2`, elementwise."""
    near = before + (values - before).clamp(-clip, clip)
    return torch.max((values - returns) ** 2, (near - returns) ** 2) / 2


class _PPOTrainer(PolicyTrainer):
    value_coef: float
    value_clip: float

    @torch.no_grad()
    def values(self, segments: Sequence[Segment]) -> list[list[float]]:
        """The expected reward before each token of each segment (a `Critic`); 0 before the first."""
        expected: list[list[float]] = [[] for _ in segments]
        self.model.eval()
        for rows in self.passes(segments):
            part = [torch.tensor(segments[i].token_ids) for i in rows]
            mask = pad([torch.ones_like(ids) for ids in part], padding_value=0).to(self.model.device)
            ids = pad(part, padding_value=self._tokenizer.pad_token_id).to(self.model.device)
            with self.accelerator.autocast():
                hidden = backbone(self.model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
                values = self._heads(hidden).tolist()
            for i, row, one in zip(rows, values, part, strict=True):
                expected[i] = [0.0, *row[: len(one) - 1]]
        return expected

    def _heads(self, hidden: torch.Tensor) -> torch.Tensor:
        """The expected reward after each token, (rows, tokens), of (rows, tokens, size) last hidden states."""
        head = self.model.value_head
        return head(hidden.to(head.weight.dtype)).squeeze(-1).float()

    def _batch(self, rows: Sequence[TrainingRow], scale: float = 1.0) -> dict[str, torch.Tensor]:
        batch = super()._batch(rows, scale)
        first = batch["prompt_ids"].size(1)
        for name in ("values", "returns"):
            columns = [torch.tensor(getattr(row, name)[first:]) for row in rows]
            batch[name] = pad(columns, padding_value=0.0).to(batch["prompt_ids"].device)
        return batch

    def _compute_loss(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """TRL's loss plus the critic's, of the same hidden states."""
        hidden: list[torch.Tensor] = []
        hook = backbone(self.model).register_forward_hook(lambda _, __, output: hidden.append(output.last_hidden_state))
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            hook.remove()
        kept = inputs["completion_ids"].size(1)
        with self.accelerator.autocast():
            values = self._heads(hidden[-1][:, -kept - 1 : -1])
        losses = clipped_value_loss(values, inputs["values"], inputs["returns"], self.value_clip)
        weighed = (losses * inputs["tool_mask"]).sum()
        self._metrics["train"]["value_loss"].append((weighed / inputs["tool_mask"].sum()).item())
        passes = self.current_gradient_accumulation_steps if self.model.training else 1
        return loss + self.value_coef * weighed / (inputs["num_items_in_batch"] * passes)

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        fresh, optimizer = self.optimizer is None, super().create_optimizer(model)
        if fresh:
            head = list(self.model.value_head.parameters())
            for group in optimizer.param_groups:
                group["params"] = [each for each in group["params"] if not any(each is own for own in head)]
            optimizer.add_param_group(
                {"params": head, "lr": _CRITIC_RATE_FACTOR * self.args.learning_rate, "weight_decay": 0.0}
            )
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        super()._save(output_dir, state_dict)
        torch.save(self.model.value_head.state_dict(), Path(output_dir or self.args.output_dir) / _FILE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.model.value_head.load_state_dict(torch.load(Path(resume_from_checkpoint) / _FILE, weights_only=True))


class PPOLearner(PolicyLearner):
    """Proximal policy optimisation (Schulman et al. 2017): every sampled token is an action (`gae_credit`).

    An iteration whose episodes all earned the same is skipped. A group may be a single episode.

    Args:
        gamma: Discount from one token of an episode to the next, above 0, at most 1.
        gae_lambda: 0 to 1; below 1 the critic's expectations after the next tokens stand for the rest of the episode, which
            means little as long as it has learned nothing.
        value_coef: Of the critic's loss; its gradient reaches the policy's model too.
        value_clip: How far from its expectation before the update the critic is moved at most, above 0.
        options: Of `PolicyLearner`, and of `GRPOConfig`: `epsilon`, `epsilon_high`, `delta`, `use_bias_correction_kl`,
            `vllm_importance_sampling_correction`, `vllm_importance_sampling_clip_max`.

    Raises `ConfigurationError` as `PolicyLearner` does, and for a number outside of its range.
    """

    OPTIONS = STEP | CLIPPING | {"gamma", "gae_lambda", "value_coef", "value_clip"}
    trainer = _PPOTrainer
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
        self._coef, self._clip = value_coef, value_clip
        self._credit = partial(gae_credit, critic=self._values, gamma=gamma, gae_lambda=gae_lambda)
        super().__init__(model, tokenizer, path, **options)

    def _values(self, segments: Sequence[Segment]) -> list[list[float]]:
        return self._trainer.values(segments)

    def _create_trainer(self, config: dict[str, Any]) -> _PPOTrainer:
        head = torch.nn.Linear(self.model.config.get_text_config().hidden_size, 1)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        ignored = self.model._keys_to_ignore_on_save or ()
        self.model._keys_to_ignore_on_save = {*ignored, "value_head.weight", "value_head.bias"}
        trainer = super()._create_trainer(config)
        assert isinstance(trainer, _PPOTrainer)
        # only now: it is neither frozen under LoRA nor given adapters
        trainer.model.value_head = head.to(self.model.device)
        trainer.value_coef, trainer.value_clip = self._coef, self._clip
        return trainer
