"""Supervised fine-tuning of a local model on conversations."""

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dreamgym_lg.errors import NothingToTrain
from dreamgym_lg.integrations.transformers.adapter_files import save_model
from dreamgym_lg.integrations.transformers.loading import load_model, load_tokenizer
from dreamgym_lg.integrations.transformers.machine import give_back_memory
from dreamgym_lg.integrations.trl.adapters import adapt, wants_adapters
from dreamgym_lg.integrations.trl.options import FROM_SCRATCH_MAX_PARAMETERS, StepOptions, default_rate, precision
from dreamgym_lg.integrations.trl.token_trainer import TokenTrainer
from dreamgym_lg.learner import TrainingRow

logger = logging.getLogger(__name__)

_TOKENS_A_PASS = 2048
"""Tokens, padding included, in one forward and backward pass of supervised training; at least one row."""
SAVE_SECONDS = 300.0
"""Time between two checkpoints of a supervised training."""
CHECKPOINT = "training.pt"
_WARMUP_STEPS = 20


class EarlyStopping:
    """Ends a training once the held-out loss has stopped falling; keeps the best weights.

    Args:
        rows: Not trained on.
        every: Optimiser steps between two measurements.
        patience: Measurements without a lower loss after which training ends.
    """

    def __init__(self, rows: Sequence[TrainingRow], *, every: int, patience: int = 4) -> None:
        self.rows = [row for row in rows if row.segment.trainable]
        self.every, self.patience = every, patience
        self.losses: dict[int, float] = {}
        """Held-out loss by optimiser step."""
        self.best: dict[str, torch.Tensor] = {}
        """The weights of the lowest loss."""

    def __call__(self, trainer: TokenTrainer, step: int) -> bool:
        """Measure, where it is due. True if the training should end after this step."""
        if step % self.every:
            return False
        self.losses[step] = self.loss(trainer)
        best = min(self.losses, key=lambda at: self.losses[at])
        if best == step:
            self.best = {name: value.detach().to("cpu", copy=True) for name, value in trainer.trained.items()}
        return step - best >= self.patience * self.every

    def loss(self, trainer: TokenTrainer) -> float:
        """The mean weighted loss of a learned token."""
        total = weight = 0.0
        segments = [row.segment for row in self.rows]
        trainer.model.eval()
        with torch.no_grad(), trainer.sharing(segments):
            for part in trainer.passes(segments):
                batch = trainer.batch([self.rows[i] for i in part])
                total -= (trainer.log_probs(batch) * batch.advantages).sum().item()
                weight += batch.advantages.sum().item()
        return total / max(weight, 1e-6)

    def restore(self, model: PreTrainedModel) -> None:
        """Give the model the best weights seen."""
        if self.best:
            model.load_state_dict(self.best, strict=False)


def _weight(rows: Sequence[TrainingRow]) -> float:
    """Sum of the weights of all learned tokens; never 0."""
    weights = (w * own for row in rows for w, own in zip(row.advantages, row.segment.sampled, strict=True))
    return max(sum(weights), 1e-6)


def _batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of row numbers, drawn anew each epoch.

    An epoch's last rows are left out where they are too few: in a smaller batch each would weigh more."""
    random, order = Random(seed), list(range(count))
    while True:
        random.shuffle(order)
        yield from (order[end - size : end] for end in range(size, count + 1, size))


def _schedule(steps: int) -> Callable[[int], float]:
    """Factor of the learning rate by step. A warmup, then half a cosine down to 0."""
    warmup = min(_WARMUP_STEPS, steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (steps - warmup))

    return factor


def train_sft(
    model: PreTrainedModel,
    rows: Sequence[TrainingRow],
    *,
    steps: int,
    batch_size: int = 24,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
    until: EarlyStopping | None = None,
    checkpoints: Path | None = None,
) -> float:
    """Train `model` in place for `steps` optimiser steps. Returns the mean loss of the last tenth.

    Rows are drawn in random order: sorted by length, they would be sorted by what an agent does in them. The model is trained
    where it is.

    Args:
        on_step: `on_step(step, loss)`, called after every step.
        until: Called after every step; it may end the training. Its losses and weights are in the checkpoints too.
        checkpoints: A folder that weights and optimiser are saved to every few minutes; a training with the same rows that
            was killed goes on from there. `fine_tune` deletes it once the model is saved. None: nothing is saved.

    Raises `NothingToTrain` if no row has a token to learn, `ConfigurationError` for a model in half precision.
    """
    usable = [row for row in rows if row.segment.trainable]
    if not usable:
        raise NothingToTrain(f"none of the {len(rows)} rows has a token to learn")
    passes = precision(model, supervised=True)
    options = StepOptions(loss="likelihood", learning_rate=learning_rate, weight_decay=0.01, adam_beta2=0.98, **passes)
    trainer = TokenTrainer(model, options, micro_batch_tokens=_TOKENS_A_PASS, schedule=_schedule(steps), multiple=64)
    file, saved = checkpoints / CHECKPOINT if checkpoints is not None else None, time.monotonic()
    losses = list[float]()
    if file is not None and file.exists():
        before = trainer.load(file)
        losses = before["losses"]
        if until is not None:
            until.losses = before.get("held_out", {})
            until.best = {name: value.to("cpu") for name, value in before.get("best", {}).items()}
        del before
    for numbers in islice(_batches(len(usable), min(batch_size, len(usable)), seed), len(losses), steps):
        batch = [usable[i] for i in numbers]
        losses.append(trainer.step(batch, scale=1 / _weight(batch))["loss"])
        if on_step is not None:
            on_step(len(losses), losses[-1])
        if until is not None and until(trainer, len(losses)):
            break
        if file is not None and time.monotonic() - saved >= SAVE_SECONDS:
            held_out = {"held_out": until.losses, "best": until.best} if until is not None else {}
            trainer.save(file, losses=losses, **held_out)
            saved = time.monotonic()
    model.eval()
    give_back_memory()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / max(len(last), 1)


def fine_tune(
    start: str | Path,
    to: Path,
    rows: Sequence[TrainingRow],
    *,
    steps: int,
    learning_rate: float | None = None,
    batch_size: int = 24,
    lora: bool | None = None,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
    evaluate: Callable[[PreTrainedModel, PreTrainedTokenizerBase, int], None] | None = None,
    held_out: Sequence[TrainingRow] = (),
    sampling: Mapping[str, Any] | None = None,
    **options: Any,
) -> float:
    """Fine-tune the model at `start` on rows drawn in random order; returns the loss.

    The model is loaded on the first GPU where there is one, in float32 or, under adapters, as it was saved. It is written to
    the folder `to`, which is either whole or not there.

    Args:
        rows: Conversations as tokens of this model (`tokenize`).
        learning_rate: Default: 7e-4 up to 50 M parameters, falling to 1e-5 at 7 B; of adapters from 2e-3 to 2e-4.
        lora: Whether adapters are trained. None: above 50 M parameters.
        on_step: As of `train_sft`.
        evaluate: `evaluate(model, tokenizer, step)`, called after every step.
        held_out: Rows whose loss ends it once it has stopped falling; the weights with the lowest are kept (`EarlyStopping`).
        sampling: Options that the model is sampled with, saved beside it (`load_named_policy`).
        options: Of `train_sft`.

    Raises what `load_model` and `train_sft` raise.
    """
    tokenizer, model = load_tokenizer(start), load_model(start)
    learning_rate = _make_trainable(model, lora, learning_rate)
    drawn = list(rows)
    Random(seed).shuffle(drawn)
    watched = EarlyStopping(_within_context(model, held_out), every=max(steps // 10, 1))

    def report(step: int, loss: float) -> None:
        if on_step is not None:
            on_step(step, loss)
        if evaluate is not None:
            evaluate(model, tokenizer, step)

    loss = train_sft(
        model,
        _within_context(model, drawn[: batch_size * steps]),
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        on_step=report,
        until=watched if watched.rows else None,
        **options,
    )
    watched.restore(model)
    save_model(model, tokenizer, to, sampling)
    if (checkpoints := options.get("checkpoints")) is not None:
        shutil.rmtree(checkpoints, ignore_errors=True)
    return loss


def _make_trainable(model: PreTrainedModel, lora: bool | None, learning_rate: float | None) -> float:
    """Put adapters into the model, or make its weights float32. Returns the learning rate."""
    adapters = wants_adapters(model, lora)
    if adapters:
        adapt(model)
    else:
        model.float()  # of bfloat16 weights, small steps are lost by rounding
    if learning_rate is None:
        small, large = (2e-3, 2e-4) if adapters else (7e-4, 1e-5)
        return default_rate(model, small=small, large=large)
    if not adapters and learning_rate > 1e-4 and model.num_parameters() > FROM_SCRATCH_MAX_PARAMETERS:
        logger.warning("a learning rate of %g for all weights of a pretrained model may undo what it knows", learning_rate)
    return learning_rate


def _within_context(model: PreTrainedModel, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The rows, each as far as the model can read it. Those without a token to learn there are left out later."""
    lengths = [len(row.segment.token_ids) for row in rows]
    longest = getattr(model.config, "max_position_embeddings", None) or max(lengths, default=0)
    if cut := sum(length > longest for length in lengths):
        logger.warning(
            "%d of %d conversations are longer than the model's %d tokens and are learned up to there: show fewer or shorter "
            "demonstrations (Settings.retrieved, retrieved_characters), or take a model with a longer context",
            *(cut, len(rows), longest),
        )
    return [_cut(row, longest) for row in rows]


def _cut(row: TrainingRow, length: int) -> TrainingRow:
    parts = {name: getattr(row.segment, name)[:length] for name in ("token_ids", "sampled", "logprobs")}
    return TrainingRow(replace(row.segment, **parts), row.advantages[:length], row.weight)
