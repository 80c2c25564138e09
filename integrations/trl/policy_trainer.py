"""TRL's `GRPOTrainer`, fed with recorded episodes instead of its own generations."""

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.utils import pad, use_adapter

from dreamgym_lg.errors import MissingDependency, writing
from dreamgym_lg.integrations.trl.adapters import REFERENCE
from dreamgym_lg.integrations.trl.ranks import Ranks
from dreamgym_lg.integrations.trl.rows import split_passes
from dreamgym_lg.integrations.trl.shared_prefix import shared_prefix, shared_tokens
from dreamgym_lg.learner import TrainingRow
from dreamgym_lg.types import Segment

for _name in ("_compute_loss", "_get_per_token_logps_and_entropies"):
    if not hasattr(GRPOTrainer, _name):
        raise MissingDependency(f"this TRL has no GRPOTrainer.{_name}; run: pip install 'trl>=1.16,<1.17'")


class Stopped(Exception):
    """Ends the trainer's thread."""


class OptimizerStep(NamedTuple):
    """One optimiser step of an iteration."""

    rows: Callable[[], Sequence[TrainingRow]]
    """Called with the weights of the steps before in place."""
    scale: float
    """The loss is this times the weighted sum over the rows."""
    first: bool
    """The first of its iteration: the weights are those that the episodes were sampled with."""
    last: bool
    save: bool
    """True: a checkpoint follows."""


def _share(rows: Sequence[TrainingRow], ranks: Ranks) -> list[TrainingRow]:
    """The rows of this rank, about as many tokens as those of any other."""
    ordered = sorted(rows, key=lambda row: -len(row.segment.token_ids))
    return ordered[ranks.rank :: ranks.size]


def _weight(rows: Sequence[TrainingRow]) -> float:
    return sum(row.weight * row.segment.trainable for row in rows)


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder without its head, also of a model with adapters."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder: PreTrainedModel = inner.base_model  # `get_decoder()` is the head of some
    return decoder


def _score(model: PreTrainedModel, labels: torch.Tensor, **inputs: Any) -> Any:
    """The outputs of TRL's fused head for the labelled tokens (not -100); 0 for the others.

    Where there is no Triton, TRL projects every token into the vocabulary. Most are observations: here only the hidden states
    before labelled tokens reach the head.
    """
    labelled = labels[:, 1:] != -100

    def pack(_: object, __: object, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, :-1][labelled][None]
        return output

    hook = backbone(model).register_forward_hook(pack)
    try:
        outputs = model(**inputs, shift_labels=labels[:, 1:][labelled][None])
    finally:
        hook.remove()
    for name in {"log_probs", "entropy"} & outputs.keys():
        outputs[name] = outputs[name].new_zeros(labelled.shape).masked_scatter(labelled, outputs[name])
    return outputs


class PolicyTrainer(GRPOTrainer):
    """TRL's trainer, which takes rows from a queue and splits them into passes itself."""

    feed: "queue.SimpleQueue[OptimizerStep | None]"
    micro_batch_tokens: int
    ends_iteration: bool = False
    """True in the last optimiser step of an iteration."""
    ranks: Ranks | None = None
    """The processes that share the rows of an optimiser step, which rank 0 has; None: this one alone."""
    _joined = False
    _measures = False
    _inputs: dict[str, torch.Tensor] | None = None
    _scored: torch.Tensor | None = None
    """True for the tokens of the completions at hand that have a weight, [rows, tokens]; None: all."""

    def training_step(self, model: Any, inputs: object, num_items_in_batch: object = None) -> torch.Tensor:
        if self.ranks is None:
            if (step := self.feed.get()) is None:
                raise Stopped
            rows = mine = step.rows()
        else:
            step, rows = self._receive(self.ranks)
            mine = _share(rows, self.ranks)
        self.control.should_save, self.ends_iteration, self._measures = step.save, step.last, step.first
        parts = [[mine[i] for i in part] for part in self.passes([row.segment for row in mine])]
        passes = len(parts) if self.ranks is None else sum(self.ranks.gather(len(parts)))
        # not Trainer's accumulation: that has a fixed number of passes, to which rows would have to be added
        self._step, self.current_gradient_accumulation_steps = 0, len(parts)
        loss = torch.zeros((), device=self.accelerator.device)
        for part in parts:
            loss += super().training_step(model, self._batch(part, step.scale * len(parts)), None)
            self._weigh_metrics(_weight(part) / _weight(rows) * passes)
        if self.ranks is not None:
            self._add_up(self.ranks, loss)
        return loss

    def _receive(self, ranks: Ranks) -> tuple[OptimizerStep, Sequence[TrainingRow]]:
        """The next optimiser step of rank 0 and its rows; with the first, its weights."""
        step, rows = None, None
        if ranks.rank == 0 and (step := self.feed.get()) is not None:
            rows = step.rows()
            step = step._replace(rows=tuple)  # a function of this process: its rows are sent beside it
        step, rows = ranks.broadcast((step, rows))
        if step is None:
            raise Stopped
        if not self._joined:
            ranks.broadcast_from_rank0(self.model.parameters())
            self._joined = True
        return step._replace(save=step.save and ranks.rank == 0), rows

    def _add_up(self, ranks: Ranks, loss: torch.Tensor) -> None:
        """Make loss and gradients those of all ranks and, on rank 0, the metrics."""
        ranks.add_up([loss])
        ranks.add_up_gradients(each for each in self.model.parameters() if each.requires_grad)
        _, *others = ranks.gather(dict(self._metrics["train"]))
        if ranks.rank == 0:
            for name, values in (pair for metrics in others for pair in metrics.items()):
                self._metrics["train"][name] += values

    def _save_checkpoint(self, model: PreTrainedModel, trial: Any) -> None:
        with writing(self.args.output_dir, SafetensorError, RuntimeError):  # which `torch.save` raises on a full disk
            super()._save_checkpoint(model, trial)

    def passes(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Split segments, by their numbers, into forward passes."""
        rows = [segment.token_ids for segment in segments]
        before = min((list(segment.sampled).index(1) for segment in segments), default=0)
        shared = shared_tokens(self.model, rows, before=before - 1)
        return split_passes([len(row) for row in rows], self.micro_batch_tokens, shared=shared)

    def _weigh_metrics(self, share: float) -> None:
        """Weigh a pass's metrics by its tokens' weights: TRL takes the mean over passes."""
        for name, values in self._metrics["train"].items():
            if name in ("kl", "entropy", "value_loss", "cispo_clip_ratio") or name.startswith(("clip_ratio/", "sampling/")):
                values[-1] *= 1.0 if name.endswith(("_min", "_max")) else share

    def _prepare_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return inputs

    def _batch(self, rows: Sequence[TrainingRow], scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Inputs that make TRL's `dapo` and `cispo` loss `scale` times the weighted sum."""
        prompts, completions, masks, logprobs, advantages = [], [], [], [], []
        largest = 1 / min(row.weight for row in rows)
        first = min(list(row.segment.sampled).index(1) for row in rows)  # prompts of one length need no padding
        for segment, advantage, weight, *_ in rows:
            prompts.append(torch.tensor(segment.token_ids[:first]))
            completions.append(torch.tensor(segment.token_ids[first:]))
            # TRL divides the sum under its mask by the number of items: weights in the mask give the weighted sum. None is
            # below 1, so that the lower bounds of TRL's denominators do not come in
            masks.append(torch.tensor(segment.sampled[first:]) * (weight * largest * scale))
            logprobs.append(torch.tensor(segment.logprobs[first:]))
            advantages.append(torch.tensor(advantage[first:]))
        token = self._tokenizer.pad_token_id
        output = {
            "prompt_ids": torch.stack(prompts),
            "prompt_mask": torch.ones(len(prompts), first, dtype=torch.long),
            "completion_ids": pad(completions, padding_value=token),
            "completion_mask": pad([torch.ones_like(ids) for ids in completions], padding_value=0),
            "tool_mask": pad(masks, padding_value=0.0),
            "sampling_per_token_logps": pad(logprobs, padding_value=0.0),
            "advantages": pad(advantages, padding_value=0.0),
            "num_items_in_batch": torch.tensor(largest),
        }
        output = {key: value.to(self.accelerator.device) for key, value in output.items()}
        if not self.vllm_importance_sampling_correction:  # with it, TRL takes the present ones, and `_compare` weighs them
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        if self.beta != 0.0:
            output["ref_per_token_logps"] = self.reference_log_probs(output)
        return output

    def _get_per_token_logps_and_entropies(
        self, model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **options: Any
    ) -> Any:
        """As TRL's, with the rows' common beginning computed once; 0 for tokens without a weight (`_scored`)."""
        before = 0 if self.aux_loss_enabled else input_ids.size(1) - logits_to_keep - 1  # a router's loss is of whole rows
        with self.accelerator.autocast():
            prefix = shared_prefix(model, input_ids, before=before)
        scored = self._scored

        def after_prefix(attention_mask: torch.Tensor, labels: torch.Tensor, **inputs: torch.Tensor) -> Any:
            ones = attention_mask.new_ones(len(attention_mask), prefix.length)
            whole = torch.cat([ones, attention_mask], dim=1)
            if scored is not None:
                labels[:, -logits_to_keep:].masked_fill_(~scored, -100)
            return _score(model, labels, **inputs, attention_mask=whole, **{prefix.argument: prefix.past})

        ids, mask = input_ids[:, prefix.length :], attention_mask[:, prefix.length :]
        outputs = super()._get_per_token_logps_and_entropies(after_prefix, ids, mask, logits_to_keep, **options)
        if self._inputs is not None:
            self._compare(self._inputs, outputs[0].detach())
        return outputs

    def _compute_loss(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self._inputs, self._scored = inputs, inputs["tool_mask"] != 0
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._inputs = self._scored = None

    def _compare(self, inputs: dict[str, torch.Tensor], log_probs: torch.Tensor) -> None:
        """Log how far probabilities are from those sampled with, and set importance weights for it."""
        more, mask = log_probs - inputs["sampling_per_token_logps"], inputs["tool_mask"]
        figures = {"sampling_logp_difference/mean": more.abs()}
        if self.vllm_importance_sampling_correction:
            inputs["importance_sampling_ratio"] = more.exp().clamp(max=self.vllm_importance_sampling_clip_max)
            figures["importance_sampling_ratio/mean"] = inputs["importance_sampling_ratio"]
        for name, values in figures.items():
            if self._measures:
                self._metrics["train"][f"sampling/{name}"].append(((values * mask).sum() / mask.sum()).item())

    @torch.no_grad()
    def log_probs(self, model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of a batch's completion tokens, [rows, tokens], at the policy's temperature; 0 where they have no weight."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        self._scored = batch["tool_mask"] != 0
        try:
            return self._get_per_token_logps_and_entropies(model, ids, mask, batch["completion_ids"].size(1))[0]
        finally:
            self._scored = None

    def reference_log_probs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """As `log_probs`, of the policy that training began with; under LoRA with the adapters that it had then, or none."""
        if self.ref_model is not None:
            return self.log_probs(self.ref_model, batch)
        with use_adapter(self.model, REFERENCE if REFERENCE in self.model.peft_config else None):
            return self.log_probs(self.model, batch)


class LikelihoodTrainer(PolicyTrainer):
    """The loss of a token is its negative log-likelihood times its advantage, without a ratio."""

    LOSS: ClassVar[Mapping[str, Any]] = {"loss_type": "cispo", "epsilon_high": 1.0}
    """Of `GRPOConfig`: with a ratio of 1, TRL's `cispo` is that loss."""

    def _batch(self, rows: Sequence[TrainingRow], scale: float = 1.0) -> dict[str, torch.Tensor]:
        batch = super()._batch(rows, scale)
        batch.pop("old_per_token_logps", None)  # TRL takes the present ones then
        return batch
