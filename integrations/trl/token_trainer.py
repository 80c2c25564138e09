"""`TokenTrainer`: optimiser steps on recorded tokens, with TRL's losses and its fused head."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import compress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from peft.helpers import disable_input_dtype_casting
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from dreamgym_lg.errors import ConfigurationError, writing
from dreamgym_lg.integrations.transformers.attention import products
from dreamgym_lg.integrations.trl.options import StepOptions
from dreamgym_lg.integrations.trl.shared_prefix import SharedPrefix, shared_prefix, shared_tokens
from dreamgym_lg.learner import TrainingRow, sft_row
from dreamgym_lg.types import Segment

Figures = dict[str, torch.Tensor]
"""What is measured of each scored token, by the metric's name."""
SAMPLING = "sampling/"
"""Begins the names of metrics that compare the trainer's probabilities with the engine's."""


class Batch(NamedTuple):
    """The rows of one pass, padded on the right. Numbers are of the scored tokens alone, row after row."""

    ids: torch.Tensor
    """(rows, tokens), as are the next two."""
    mask: torch.Tensor
    scored: torch.Tensor
    """True for sampled tokens, and those of observations to be predicted."""
    own: torch.Tensor
    """(scored tokens): True for the sampled ones."""
    observed: torch.Tensor
    """(scored tokens that are not own): weights of their cross-entropy."""
    weights: torch.Tensor
    """(own tokens), as are the others."""
    logprobs: torch.Tensor
    """As recorded."""
    advantages: torch.Tensor
    values: torch.Tensor
    """A critic's values; empty without one, as are the returns."""
    returns: torch.Tensor


class Scores(NamedTuple):
    """Log-probabilities and entropy of the scored tokens, by one forward pass."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    hidden: torch.Tensor
    """Last hidden states before them, (scored tokens, size)."""
    aux_loss: torch.Tensor | None
    """Load-balancing loss of a mixture of experts."""


def split_passes(lengths: Sequence[int], tokens: int, *, shared: int = 0) -> list[list[int]]:
    """Split rows, by their numbers, into passes of rows of like length, the longest first.

    Args: `lengths`, of the rows; `tokens`, the most that a pass computes, padding included: a longer row has one of its own;
    `shared`, tokens with which every row begins, computed once for all passes (`shared_prefix`).
    """
    passes: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if passes and (lengths[passes[-1][0]] - shared) * (len(passes[-1]) + 1) <= tokens:
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes


def _token_losses(
    options: StepOptions, log_probs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, Figures]:
    """The loss of each token, as TRL's; and which ones are clipped."""
    low = options.epsilon
    high = low if options.epsilon_high is None else options.epsilon_high
    if options.loss == "likelihood":
        return -advantages * log_probs, {}
    if options.loss == "cispo":
        clipped = ((ratio > high) & (advantages > 0)).float()
        return -ratio.clamp(max=high).detach() * advantages * log_probs, {"cispo_clip_ratio": clipped}
    near = ratio.clamp(1 - low, 1 + high)
    if options.delta is not None:
        ratio = ratio.clamp(max=options.delta)
    below, above = (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0)
    shares = {"low_mean": below, "high_mean": above, "region_mean": below | above}
    figures = {f"clip_ratio/{name}": share.float() for name, share in shares.items()}
    return -torch.min(ratio * advantages, near * advantages), figures


class TokenTrainer:
    """Trains the parameters of a model that require gradients.

    Args:
        model: With adapters in its layers, or none.
        options: How each step is taken.
        micro_batch_tokens: In one forward and backward pass, padding included, at most; a longer row has a pass of its own.
        schedule: Factor of the learning rate, by the number of steps taken.
        multiple: Rows are padded to a multiple of it: on a CPU each new length costs the compilation of its kernels (oneDNN).
        reference: The trained parameters of the policy that the KL term holds to.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: StepOptions,
        *,
        micro_batch_tokens: int,
        schedule: Callable[[int], float] = lambda _: 1.0,
        multiple: int = 1,
        reference: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.model, self.options, self.micro_batch_tokens, self.steps = model, options, micro_batch_tokens, 0
        self.trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.critic = torch.nn.Module()
        self._schedule, self._multiple, self._reference = schedule, multiple, reference
        self._prefixes: list[SharedPrefix | None] = [None, None]
        """Shared prefixes of the step's rows: the policy's, and the reference's."""
        self._scorer = copy(model)  # whose forward alone becomes another
        add_fused_lm_head(self._scorer, options.temperature, outputs=("log_probs", "entropy"))
        text = model.config.get_text_config()
        self._router_coef = getattr(text, "router_aux_loss_coef", 0.0) if hasattr(text, "output_router_logits") else 0.0
        if options.activation_checkpointing:
            model.activation_checkpointing_enable()
        matrices = [each for each in self.trained.values() if each.ndim > 1]
        others = [each for each in self.trained.values() if each.ndim < 2]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=options.learning_rate,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            fused=True,
        )

    def step(self, rows: Sequence[TrainingRow], *, scale: float = 1.0, rate: float = 1.0) -> dict[str, float]:
        """Take one optimiser step; returns its metrics.

        The loss is `scale` times the weighted sum over the rows' sampled tokens (`TrainingRow`), the learning rate `rate` times
        the schedule's. Metrics are means over tokens, weighed as in the loss.
        """
        sums = self._backward(rows, scale)
        parameters = list(self._state().values())
        factor = rate * self._schedule(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.options.max_grad_norm or float("inf")).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        loss, weight = sums.pop("loss"), sum(row.weight * row.segment.trainable for row in rows)
        rate = self.options.learning_rate * factor
        return {"loss": loss, "grad_norm": norm, "learning_rate": rate, **{name: sums[name] / weight for name in sorted(sums)}}

    def _backward(self, rows: Sequence[TrainingRow], scale: float) -> dict[str, float]:
        """Add up the gradients of all passes. Returns the loss, and sums of the figures by weight."""
        sums: dict[str, float] = defaultdict(float)
        self.model.train()  # first: with checkpointing, what rows share is computed once in evaluation alone
        passes = self.passes(segments := [row.segment for row in rows])
        try:
            with self.sharing(segments):
                for part in passes:
                    batch = self.batch([rows[i] for i in part])
                    loss, figures = self.loss(batch, aux_weight=1 / (scale * len(passes)))
                    (scale * loss).backward()
                    sums["loss"] += scale * loss.item()
                    for name, values in figures.items():
                        sums[name] += (values * batch.weights).sum().item()
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"micro_batch_tokens={self.micro_batch_tokens}: so many tokens are in one pass; fewer need less memory, for "
                "the same gradient"
            )
            raise
        return sums

    def passes(self, segments: Sequence[Segment]) -> list[list[int]]:
        """Split segments, by their numbers, into forward passes."""
        lengths = [self._padded(len(segment.token_ids)) for segment in segments]
        return split_passes(lengths, self.micro_batch_tokens, shared=len(self._shared(segments)))

    def _shared(self, segments: Sequence[Segment]) -> Sequence[int]:
        """The tokens that all segments begin with, if they are computed once."""
        if self._router_coef or not segments:  # a router's loss is of whole rows
            return ()
        before = max(min(list(segment.sampled).index(1) for segment in segments) - 1, 0)
        rows = [segment.token_ids for segment in segments]
        return rows[0][: shared_tokens(self.model, rows, before=before)]

    @contextmanager
    def sharing(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Compute the first tokens of all segments once, for all passes in the block."""
        shared, training, reference = self._shared(segments), self.model.training, None
        with products(self.model):
            with self._autocast():
                prefix = shared_prefix(self.model, shared)
                if self._reference is not None and shared:
                    self._swap()
                    with torch.no_grad():
                        reference = shared_prefix(self.model.eval(), shared)
                    self._swap()
                    self.model.train(training)
            self._prefixes = [leaves := prefix.detached(), reference]
            try:
                yield
                prefix.backward(leaves)
            finally:
                self._prefixes = [None, None]

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """Compute in bfloat16 where the options say so."""
        device, bf16 = self.model.device.type, self.options.bf16
        # PEFT would copy what adapters read to float32, and autocast that to bfloat16 again
        with torch.autocast(device, dtype=torch.bfloat16, enabled=bf16), disable_input_dtype_casting(self.model, bf16):
            yield

    def _padded(self, length: int) -> int:
        longest = getattr(self.model.config, "max_position_embeddings", None) or 1 << 30
        return max(length, min(-(-length // self._multiple) * self._multiple, longest))

    def batch(self, rows: Sequence[TrainingRow]) -> Batch:
        """The rows of one pass, where the model is."""
        shape = len(rows), self._padded(max(len(row.segment.token_ids) for row in rows))
        ids, mask, scored = torch.zeros(3, *shape, dtype=torch.long)
        columns: list[list[float]] = [[] for _ in range(7)]
        for i, (segment, advantages, weight, values, returns, observed) in enumerate(rows):
            size, own = len(segment.token_ids), segment.sampled
            both = [one or int(other > 0) for one, other in zip(own, observed or [0.0] * size, strict=True)]
            ids[i, :size], mask[i, :size], scored[i, :size] = torch.tensor(segment.token_ids), 1, torch.tensor(both)
            columns[0] += compress(own, both)
            columns[1] += filter(None, observed)
            columns[2] += [weight] * sum(own)
            for column, numbers in zip(columns[3:], (segment.logprobs, advantages, values, returns), strict=True):
                column += compress(numbers, own)
        sampled, *others = (torch.tensor(column) for column in columns)
        batch = Batch(ids, mask, scored.bool(), sampled.bool(), *others)
        return Batch(*(each.to(self.model.device) for each in batch))

    def loss(self, batch: Batch, *, aux_weight: float = 1.0) -> tuple[torch.Tensor, Figures]:
        """The weighted sum of the tokens' losses, and figures of each token.

        Args: `aux_weight`, of the load-balancing loss of a mixture of experts.
        """
        o, reference = self.options, self.reference_log_probs(batch)[batch.own] if self.options.beta else None
        scores = self.forward(batch)
        present, corrected = scores.log_probs[batch.own], o.vllm_importance_sampling_correction
        more = present.detach() - batch.logprobs
        ratio = (present - (present.detach() if corrected else batch.logprobs)).exp()
        losses, figures = _token_losses(o, present, ratio, batch.advantages)
        figures |= {"entropy": scores.entropy[batch.own], f"{SAMPLING}sampling_logp_difference/mean": more.abs()}
        if corrected:
            weights = more.exp().clamp(max=o.vllm_importance_sampling_clip_max)
            losses = losses * weights
            figures[f"{SAMPLING}importance_sampling_ratio/mean"] = weights
        if reference is not None:
            kl = (reference - present).exp() - (reference - present) - 1
            kl = kl * ratio if o.use_bias_correction_kl else kl
            losses = losses + o.beta * kl
            figures["kl"] = kl.detach()
        other, others = self.other_loss(batch, scores)
        loss = (losses * batch.weights).sum() - (scores.log_probs[~batch.own] * batch.observed).sum() + other
        if scores.aux_loss is not None:
            loss = loss + aux_weight * self._router_coef * scores.aux_loss
        return loss, figures | others

    def other_loss(self, batch: Batch, scores: Scores) -> tuple[torch.Tensor | float, Figures]:
        """A further loss of a subclass, and its figures."""
        return 0.0, {}

    def forward(self, batch: Batch) -> Scores:
        """Score the learned tokens. Hidden states before one alone reach the head; TRL scores all where there is no Triton."""
        ids, kept = batch.ids, list[torch.Tensor]()

        def pack(_: object, __: object, output: Any) -> Any:
            kept.append(output.last_hidden_state[:, :-1][scored])
            output.last_hidden_state = kept[0][None]
            return output

        with self._autocast():
            prefix = self._prefixes[0] or shared_prefix(self.model, ())
            scored = batch.scored[:, prefix.length + 1 :]
            inputs = prefix.inputs(self.model, ids, batch.mask)
            if self._router_coef:
                inputs |= {"attention_mask": batch.mask, "output_router_logits": True}
            hook = self.backbone.register_forward_hook(pack)
            try:
                labels = ids[:, prefix.length + 1 :][scored][None]
                outputs = self._scorer(**inputs, shift_labels=labels, fused_lm_head=True)
            finally:
                hook.remove()
        return Scores(outputs.log_probs[0], outputs.entropy[0].detach(), kept[0], outputs.aux_loss)

    @property
    def backbone(self) -> PreTrainedModel:
        """The decoder without its head."""
        return self.model.base_model  # `get_decoder()` is the head of some

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probabilities of the scored tokens at the policy's temperature, [scored tokens]."""
        training = self.model.training
        self.model.eval()
        try:
            return self.forward(batch).log_probs
        finally:
            self.model.train(training)

    def reference_log_probs(self, batch: Batch) -> torch.Tensor:
        """As `log_probs`, of the reference."""
        self._swap()
        try:
            return self.log_probs(batch)
        finally:
            self._swap()

    def log_ratios(self, segments: Sequence[Segment]) -> list[float]:
        """Log-probability of each segment's sampled tokens under the policy, minus the reference's."""
        ratios = [0.0] * len(segments)
        self.model.eval()
        with torch.no_grad(), self.sharing(segments):
            for part in self.passes(segments):
                batch = self.batch([sft_row(segments[i]) for i in part])
                more = self.log_probs(batch) - self.reference_log_probs(batch)
                for i, tokens in zip(part, more.split([segments[i].trainable for i in part]), strict=True):
                    ratios[i] = tokens.sum().item()
        return ratios

    def _swap(self) -> None:
        """Exchange the trained parameters for the reference's."""
        assert self._reference is not None, "a KL term has a reference"
        self._prefixes.reverse()
        for name, parameter in self.trained.items():
            parameter.data, self._reference[name] = self._reference[name], parameter.data

    def _state(self) -> dict[str, torch.nn.Parameter]:
        return {**self.trained, **{f"critic.{name}": each for name, each in self.critic.named_parameters()}}

    def save(self, file: Path, **more: Any) -> None:
        """Write weights and optimiser, and `more`, whole or not at all."""
        draft = file.with_suffix(".tmp")
        state = {"weights": self._state(), "optimizer": self.optimizer.state_dict(), "steps": self.steps, **more}
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with writing(file.parent, RuntimeError):  # which `torch.save` raises on a full disk
                torch.save(state, draft)
                draft.replace(file)
        finally:
            draft.unlink(missing_ok=True)

    def load(self, file: Path) -> dict[str, Any]:
        """Go on from there; returns all that was saved. Raises `ConfigurationError` for a damaged file, or of other weights."""
        try:
            state: dict[str, Any] = torch.load(file, map_location=self.model.device, weights_only=True)
            for name, value in self._state().items():
                value.data.copy_(state["weights"][name])
            groups = self.optimizer.param_groups
            options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
            self.optimizer.load_state_dict(state["optimizer"])
            for group, own in zip(self.optimizer.param_groups, options, strict=True):  # options may differ since
                group.pop("initial_lr", None)
                group.update(own)
        except (RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
            kind = type(error).__name__
            raise ConfigurationError(f"{file} cannot be read ({kind}): delete it, and the training begins anew") from error
        self.steps = state["steps"]
        return state
