"""Supervised fine-tuning of a local model on conversations, by TRL's `SFTTrainer`."""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import torch
from datasets import Dataset
from safetensors import SafetensorError
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from dreamgym_lg.errors import NothingToTrain, writing
from dreamgym_lg.integrations.transformers.adapter_files import loaded_adapters, write_model
from dreamgym_lg.integrations.transformers.loading import load_model, load_tokenizer, trains_bfloat16
from dreamgym_lg.integrations.trl.adapters import adapt, wants_adapters
from dreamgym_lg.integrations.trl.options import FROM_SCRATCH_MAX_PARAMETERS, check_options, default_rate, precision
from dreamgym_lg.integrations.trl.rows import (
    TokenizedConversation,
    create_collator,
    padded,
    split_passes,
    weigh_first_lines,
)
from dreamgym_lg.integrations.trl.shared_prefix import shared_prefix, shared_tokens

logger = logging.getLogger(__name__)


class EarlyStopping:
    """Ends a training once the held-out loss has stopped falling; keeps the best weights.

    Args:
        rows: Not trained on, with weights.
        every: Optimiser steps between two measurements.
        patience: Measurements without a lower loss after which training ends.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, rows: Sequence[TokenizedConversation], *, every: int = 25, patience: int = 4
    ) -> None:
        self.batches = [rows[start : start + 4] for start in range(0, len(rows), 4)]
        self.pad_id = tokenizer.pad_token_id
        self.every, self.patience = every, patience
        self.losses: dict[int, float] = {}
        """By optimiser step."""
        self._best: dict[str, torch.Tensor] = {}

    def __call__(self, model: PreTrainedModel, step: int) -> bool:
        """True where the training should end after this step."""
        if step % self.every:
            return False
        self.losses[step] = self.loss(model)
        best = min(self.losses, key=lambda at: self.losses[at])
        if best == step:
            trained = (pair for pair in model.named_parameters() if pair[1].requires_grad)
            self._best = {name: value.detach().to("cpu", copy=True) for name, value in trained}
        return step - best >= self.patience * self.every

    @torch.no_grad()
    def loss(self, model: PreTrainedModel) -> float:
        """The mean weighted loss of a learned token."""
        total = weight = 0.0
        training, collate = model.training, create_collator(self.pad_id, _longest(model))
        model.eval()
        for batch in self.batches:
            inputs = {name: value.to(model.device) for name, value in collate(list(batch)).items()}
            weights = _total_weight(inputs).item()
            total += weighted_loss(model, inputs)[0].item() * weights
            weight += weights
        model.train(training)
        return total / max(weight, 1e-6)

    def restore(self, model: PreTrainedModel) -> None:
        """Give the model the best weights seen."""
        if self._best:
            model.load_state_dict(self._best, strict=False)


def weighted_loss(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, CausalLMOutputWithPast]:
    """The weighted mean of the learned tokens' losses, and the model's outputs.

    `inputs["total"]` divides the weighted sum; default: the sum of the weights. The outputs are those of the positions at which
    some row's next token is learned: logits cost most.
    """
    labels, weights = inputs["labels"][:, 1:], inputs["weights"][:, 1:]
    kept = (labels != -100).any(dim=0).nonzero()[:, 0]
    ids = inputs["input_ids"]  # a short beginning is cheaper computed with every row than masked
    prefix = shared_prefix(model, ids, before=int(kept[0]) if len(kept) else 0, least=ids.size(1) // 4)
    outputs = model(**prefix.inputs(ids, inputs["attention_mask"]), logits_to_keep=kept - prefix.length)
    labels, weights = labels[:, kept], weights[:, kept]
    learned = labels != -100
    losses = torch.nn.functional.cross_entropy(outputs.logits[learned].float(), labels[learned], reduction="none")
    return (losses * weights[learned]).sum() / inputs.get("total", _total_weight(inputs)), outputs


class _WeightedTrainer(SFTTrainer):
    """TRL's trainer with a loss weight per token."""

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "weights"]

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: object) -> Any:
        loss, outputs = weighted_loss(model, inputs)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """One batch in passes of `_TOKENS_A_PASS` tokens, whose gradients add up."""
        total, losses = _total_weight(inputs), []
        lengths = [padded(length) for length in inputs["attention_mask"].sum(dim=1).tolist()]
        learned = (inputs["labels"][:, 1:] != -100).any(dim=0).int().argmax()
        shared = shared_tokens(model, inputs["input_ids"].tolist(), before=int(learned))
        for rows in split_passes(lengths, _TOKENS_A_PASS, shared=shared):
            length = max(lengths[row] for row in rows)
            part = {name: values[rows, :length] for name, values in inputs.items()}
            losses.append(super().training_step(model, {**part, "total": total}, None))
        return torch.stack(losses).sum()


_TOKENS_A_PASS = 2048
"""Tokens, padding included, that one forward and backward pass of supervised training computes; at least one row."""


def _total_weight(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of all tokens that are learned; never 0."""
    return inputs["weights"][:, 1:][inputs["labels"][:, 1:] != -100].sum().clamp(min=1e-6)


SAVE_SECONDS = 300.0
"""Time between two checkpoints of a supervised training."""


class _Progress(TrainerCallback):
    """Keeps and reports the loss of each step; ends the training early; saves at times.

    Args: `until`, True after the last step; `enough`, the mean loss that ends it; `saves`, whether it saves.
    """

    def __init__(
        self,
        on_step: Callable[[int, float], None] | None,
        until: Callable[[int], bool] | None,
        *,
        enough: float,
        saves: bool,
    ) -> None:
        self.losses: list[float] = []
        self._on_step, self._until, self._enough = on_step, until, enough
        self._saves, self._saved = saves, time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self._saves and time.monotonic() - self._saved >= SAVE_SECONDS:
            control.should_save, self._saved = True, time.monotonic()
        if self._until is not None and self._until(state.global_step):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: object) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])
            if sum(self.losses[-_MEASURED:]) < self._enough * _MEASURED and len(self.losses) >= _MEASURED:
                control.should_training_stop = True
            if self._on_step is not None:
                self._on_step(state.global_step, logs["loss"])


SATURATED_LOSS = 0.1
"""Nats a token: a policy that is trained further has too little entropy left to explore."""
_MEASURED = 4
"""Steps whose mean loss says that it is low enough."""

_SETTINGS: Mapping[str, Any] = {
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.01,
    "adam_beta2": 0.98,
    "logging_steps": 1,
    "save_strategy": "no",
    "save_total_limit": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "remove_unused_columns": False,
}

_ADVICE: Mapping[str, str] = {
    "max_steps": "give `steps`",
    "num_train_epochs": "give `steps`",
    "per_device_train_batch_size": "give `batch_size`",
    "output_dir": "nothing is saved while it trains; `fine_tune` and `save_model` write the trained model",
    "use_cpu": "it trains where the model is: load the model on that device",
    "gradient_checkpointing": "transformers calls it `activation_checkpointing` now (on by default on a GPU)",
    "max_length": "cut the rows: they are trained on as they are",
    "packing": "the rows are trained on as they are",
    "assistant_only_loss": "the rows' labels say what is learned (`tokenize`)",
    "completion_only_loss": "the rows' labels say what is learned (`tokenize`)",
    "dataset_kwargs": "the rows are tokenized already",
    "remove_unused_columns": "the rows' weights are needed",
}
"""Options of TRL's `SFTConfig` that are not taken, and what to do instead."""


def train_sft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TokenizedConversation],
    *,
    steps: int,
    batch_size: int = 24,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
    until: Callable[[int], bool] | None = None,
    checkpoints: Path | None = None,
    enough: float = 0.0,
    **config: Any,
) -> float:
    """Train `model` in place for `steps` optimiser steps; returns the mean loss of the last tenth.

    Rows are drawn in random order: sorted by length, they would be sorted by what an agent does in them. The model is trained
    where it is, under bf16 autocast on a GPU or, without one, on a CPU with AMX or AVX512_BF16 (`bf16=False`: none).

    Args:
        on_step: `on_step(step, loss)`, called after every step.
        until: `until(step)`, called after every step; True ends the training early.
        checkpoints: A folder that weights and optimiser are saved to every few minutes; a training with the same rows that
            was killed goes on from there. It is deleted at the end. None: nothing is saved.
        enough: Mean loss of the last steps below which it ends early.
        config: Further arguments of TRL's `SFTConfig`.

    Raises `NothingToTrain` if no row has a label, `ConfigurationError` for an option that is unknown or set already and for a
    model whose weights are in half precision.
    """
    taken = {field.name for field in fields(SFTConfig)} - set(_ADVICE)
    check_options("train_sft", config, known=taken, advice=_ADVICE, config=SFTConfig)
    usable = [{"weights": [1.0] * len(row["labels"]), **row} for row in rows if any(x != -100 for x in row["labels"])]
    if not usable:
        raise NothingToTrain(f"none of the {len(rows)} rows has a token to learn: check the labels")
    progress = _Progress(on_step, until, enough=enough, saves=checkpoints is not None)
    trained = loaded_adapters(model) or model  # of adapters, checkpoints hold nothing else
    with tempfile.TemporaryDirectory() if checkpoints is None else nullcontext(str(checkpoints)) as folder:
        options = {"max_steps": steps, "learning_rate": learning_rate, "seed": seed, "output_dir": folder, **config}
        options["per_device_train_batch_size"] = min(batch_size, len(usable))
        trainer = _WeightedTrainer(
            model=trained,
            args=_arguments(model, options),
            train_dataset=Dataset.from_list(usable),
            data_collator=create_collator(tokenizer.pad_token_id, _longest(model)),
            processing_class=tokenizer,
            callbacks=[progress],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if Path(folder).exists() else None)
        finally:  # else all that the model computes later is under this training's autocast, and the next one has none
            trainer.accelerator.unwrap_model(trained, keep_fp32_wrapper=False)
            trained._is_accelerate_prepared = False
    model.eval()
    if checkpoints is not None:
        shutil.rmtree(checkpoints, ignore_errors=True)
    last = progress.losses[-max(1, len(progress.losses) // 10) :]
    return sum(last) / max(len(last), 1)


def _arguments(model: PreTrainedModel, config: Mapping[str, Any]) -> SFTConfig:
    warmup = min(20, config["max_steps"] // 10)
    arguments: dict[str, Any] = {**_SETTINGS, **precision(model, config), "warmup_steps": warmup}
    if arguments["use_cpu"] and trains_bfloat16():
        arguments["bf16"] = not config.get("fp16")
    args = SFTConfig(**{**arguments, **config})
    args._n_gpu = min(args.n_gpu, 1)  # one process trains on one GPU, whatever else is visible
    return args


def fine_tune(
    start: str | Path,
    to: Path,
    rows: Sequence[TokenizedConversation],
    *,
    steps: int,
    learning_rate: float | None = None,
    batch_size: int = 24,
    lora: bool | None = None,
    first_lines_weight: float = 1.0,
    seed: int = 0,
    until: Callable[[PreTrainedModel, PreTrainedTokenizerBase, int], bool] | None = None,
    held_out: Sequence[TokenizedConversation] = (),
    **options: Any,
) -> float:
    """Fine-tune the model at `start` on rows drawn in random order; returns the loss.

    The model is loaded on the first GPU where there is one, in float32 or, under adapters, as it was saved. It is written to
    the folder `to`, which is either whole or not there.

    Args:
        rows: Conversations as tokens of this model (`tokenize`).
        learning_rate: Default: 7e-4 up to 50 M parameters, falling to 1e-5 at 7 B; of adapters to 2e-4.
        lora: Whether adapters are trained, until the loss is `SATURATED_LOSS`. None: above 50 M parameters.
        first_lines_weight: The loss weight of every reply's first two lines, in rows that have no weights.
        until: `until(model, tokenizer, step)` may end it early.
        held_out: Rows whose loss ends it once it has stopped falling; the weights with the lowest are kept (`EarlyStopping`).
        options: Of `train_sft`.

    Raises what `load_model` and `train_sft` raise.
    """
    tokenizer, model = load_tokenizer(start), load_model(start)
    adapters = wants_adapters(model, lora)
    if adapters:
        adapt(model)
    else:
        model = model.float()  # of bfloat16 weights, small steps are lost by rounding
    if learning_rate is None:
        learning_rate = default_rate(model, small=7e-4, large=2e-4 if adapters else 1e-5)
    elif not adapters and learning_rate > 1e-4 and model.num_parameters() > FROM_SCRATCH_MAX_PARAMETERS:
        logger.warning("a learning rate of %g for all weights of a pretrained model may undo what it knows", learning_rate)
    drawn = list(rows)
    Random(seed).shuffle(drawn)
    watched = EarlyStopping(tokenizer, weigh_first_lines(tokenizer, held_out, weight=first_lines_weight))
    ends = [partial(until, model, tokenizer)] if until else []
    ends += [partial(watched, model)] if held_out else []
    enough = SATURATED_LOSS if adapters else 0.0
    loss = train_sft(
        model,
        tokenizer,
        _within_context(model, weigh_first_lines(tokenizer, drawn[: batch_size * steps], weight=first_lines_weight)),
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        until=(lambda step: any([end(step) for end in ends])) if ends else None,
        enough=enough,
        **options,
    )
    watched.restore(model)
    save_model(model, tokenizer, to)
    return loss


def _longest(model: PreTrainedModel) -> int | None:
    """The model's context in tokens; None where its configuration does not say."""
    return getattr(model.config, "max_position_embeddings", None)


def _within_context(model: PreTrainedModel, rows: Sequence[TokenizedConversation]) -> list[TokenizedConversation]:
    longest = _longest(model)
    kept = [row for row in rows if longest is None or len(row["input_ids"]) <= longest]
    if len(kept) < len(rows):
        logger.warning(
            "%d of %d conversations are longer than the model's %d tokens and are left out: show fewer or shorter "
            "demonstrations (Settings.retrieved, retrieved_characters), or take a model with a longer context",
            len(rows) - len(kept),
            len(rows),
            longest,
        )
    return kept


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write a model folder with tokenizer and chat template, whole or not at all; adapters stand beside their base.

    Its file `version` names these weights: each time they are written it is another one. Raises `ConfigurationError` where the
    disk does not take them.
    """
    draft, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    for left in (draft, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        with writing(path, SafetensorError):
            write_model(model, draft, place=path)
            tokenizer.save_pretrained(draft)
            (draft / "version").write_text(uuid4().hex[:8])
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)  # what was stored meanwhile needs the space
        raise
    if path.exists():
        path.rename(old)  # a folder cannot be replaced in one step, and deleting it in place can be interrupted
    draft.rename(path)
    shutil.rmtree(old, ignore_errors=True)
