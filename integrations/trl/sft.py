"""Supervised fine-tuning of a local model on conversations, by TRL's `SFTTrainer`."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from dreamgym_lg.errors import MissingDependency, NothingToTrain

try:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import get_training_chat_template
except ImportError as error:
    raise MissingDependency.extra("trl", "train") from error

Row = dict[str, list[Any]]
"""`input_ids`, `labels` (-100 where nothing is learned) and optionally `weights`, the loss weight of each token."""


def tokenize(
    tokenizer: Any, conversations: Sequence[Sequence[dict[str, str]]], *, everything: bool = False
) -> list[Row]:
    """Conversations as training rows: `labels` hold the assistant's replies, or all tokens with `everything` (pretraining).

    A chat template without `{% generation %}` marks is replaced by TRL's training version of it, where TRL has one.
    """
    template = tokenizer.chat_template
    if "{% generation %}" not in template:
        template = get_training_chat_template(tokenizer)
    encoded = tokenizer.apply_chat_template(
        list(conversations), chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return [
        {"input_ids": ids, "labels": [x if learned or everything else -100 for x, learned in zip(ids, mask, strict=True)]}
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    ]


def weigh_first_lines(tokenizer: Any, rows: Sequence[Row], *, lines: int, weight: float) -> list[Row]:
    """The rows with `weight` on the first `lines` lines of every reply and 1 elsewhere."""
    breaks = {id for token, id in tokenizer.get_vocab().items() if "\n" in tokenizer.convert_tokens_to_string([token])}
    weighed = []
    for row in rows:
        weights, left, learning = [], 0, False
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            if label != -100 and not learning:
                left = lines
            learning = label != -100
            weights.append(weight if learning and left > 0 else 1.0)
            left -= token in breaks
        weighed.append({**row, "weights": weights})
    return weighed


class _WeightedTrainer(SFTTrainer):
    """Adds a weight per token to the loss: what an answer is judged by counts more than what it describes."""

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "weights"]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels, weights = inputs["labels"][:, 1:], inputs["weights"][:, 1:]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)
        learned = labels != -100
        logits = outputs.logits[:, :-1][learned].float()
        losses = torch.nn.functional.cross_entropy(logits, labels[learned], reduction="none")
        loss = (losses * weights[learned]).sum() / weights[learned].sum().clamp(min=1e-6)
        return (loss, outputs) if return_outputs else loss


class _Progress(TrainerCallback):
    def __init__(self, report: Callable[[int, float], None], until: Callable[[int], bool] | None) -> None:
        self.report, self.until = report, until

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.until is not None and self.until(state.global_step):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.report(state.global_step, logs["loss"])


def _collate(pad_id: int) -> Callable[[list[Row]], dict[str, torch.Tensor]]:
    def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
        def pad(values: list[list[Any]], fill: float, dtype: torch.dtype) -> torch.Tensor:
            tensors = [torch.tensor(value, dtype=dtype) for value in values]
            return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)

        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": pad(ids, pad_id, torch.long),
            "attention_mask": pad([[1] * len(row) for row in ids], 0, torch.long),
            "labels": pad([row["labels"] for row in rows], -100, torch.long),
            "weights": pad([row["weights"] for row in rows], 0.0, torch.float),
        }

    return collate


_SETTINGS: Mapping[str, Any] = {
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.01,
    "adam_beta2": 0.98,
    "train_sampling_strategy": "group_by_length",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "bf16": False,
    "activation_checkpointing": False,
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "remove_unused_columns": False,
}


def train_sft(
    model: Any, tokenizer: Any, rows: Sequence[Row], *, steps: int, batch_size: int = 24, learning_rate: float = 1e-3,
    seed: int = 0, on_step: Callable[[int, float], None] | None = None, until: Callable[[int], bool] | None = None,
    **config: Any,
) -> float:  # fmt: skip
    """Train `model` in place for `steps` optimiser steps; returns the mean loss of the last tenth.

    `until` is asked after every step, with its number, and ends the training early.
    Rows of like length share a batch. `config` goes to TRL's `SFTConfig`. Raises `NothingToTrain` if no row has a label.
    """
    usable = [{"weights": [1.0] * len(row["labels"]), **row} for row in rows if any(x != -100 for x in row["labels"])]
    if not usable:
        raise NothingToTrain(f"none of the {len(rows)} rows has a token to learn: check the labels")
    losses: list[float] = []

    def note(step: int, loss: float) -> None:
        losses.append(loss)
        if on_step is not None:
            on_step(step, loss)

    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            **_SETTINGS, "output_dir": folder, "max_steps": steps, "seed": seed, "learning_rate": learning_rate,
            "per_device_train_batch_size": min(batch_size, len(usable)), "warmup_steps": min(20, steps // 10),
            "use_cpu": model.device.type == "cpu", **config,
        }  # fmt: skip
        trainer = _WeightedTrainer(
            model=model, args=SFTConfig(**settings), train_dataset=Dataset.from_list(usable),
            data_collator=_collate(tokenizer.pad_token_id), processing_class=tokenizer, callbacks=[_Progress(note, until)],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def fine_tune(
    start: str | Path,
    to: Path,
    conversations: Sequence[Sequence[dict[str, str]]],
    *,
    steps: int,
    learning_rate: float,
    batch_size: int = 24,
    everything: bool = False,
    first_lines_weight: float = 1.0,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
    until: Callable[[Any, Any, int], bool] | None = None,
    **config: Any,
) -> float:
    """Fine-tune the model at `start` on conversations drawn in random order, and write it to `to`; returns the loss.

    `until(model, tokenizer, step)` may end it early.
    `first_lines_weight` is the loss weight of every reply's first two lines. The folder `to` is either whole or not there.
    """
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForCausalLM.from_pretrained(start)
    order = list(conversations)
    Random(seed).shuffle(order)
    rows = tokenize(tokenizer, order[: batch_size * steps], everything=everything)
    rows = weigh_first_lines(tokenizer, rows, lines=2, weight=first_lines_weight)
    loss = train_sft(
        model, tokenizer, rows, steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed, on_step=on_step,
        until=partial(until, model, tokenizer) if until else None, **config,
    )  # fmt: skip
    save_model(model, tokenizer, to)
    return loss


def save_model(model: Any, tokenizer: Any, path: Path) -> None:
    """Write a model folder, tokenizer and chat template with it, that is either whole or not there."""
    draft, old = path.with_name(path.name + ".tmp"), path.with_name(path.name + ".old")
    for left in (draft, old):
        shutil.rmtree(left, ignore_errors=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    if path.exists():
        path.rename(old)  # a folder cannot be replaced in one step, and deleting it in place can be interrupted
    draft.rename(path)
    shutil.rmtree(old, ignore_errors=True)
