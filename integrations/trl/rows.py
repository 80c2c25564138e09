"""The rows of supervised training: conversations as tokens, with labels and loss weights."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NotRequired, TypedDict

import torch
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template

Conversation = Sequence[Mapping[str, str]]
"""Messages with `role` and `content`."""


class TokenizedConversation(TypedDict):
    """A row of supervised training; all lists have the length of the conversation in tokens."""

    input_ids: list[int]
    labels: list[int]
    """-100 where nothing is learned."""
    weights: NotRequired[list[float]]
    """The loss weight of each token; 1 without it."""


def tokenize(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation]) -> list[TokenizedConversation]:
    """Conversations as training rows, whose labels are the assistant's replies.

    A chat template without `{% generation %}` marks is replaced by TRL's training version of it, where TRL has one.
    """
    template = tokenizer.chat_template
    if "{% generation %}" not in template:
        template = get_training_chat_template(tokenizer)
    encoded = tokenizer.apply_chat_template(
        list(conversations), chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return [
        {"input_ids": ids, "labels": [x if learned else -100 for x, learned in zip(ids, mask, strict=True)]}
        for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    ]


def reply_lengths(row: TokenizedConversation) -> list[int]:
    """The length of each reply in tokens, its end token included."""
    return [len(list(part)) for learned, part in groupby(row["labels"], lambda label: label != -100) if learned]


def weigh_first_lines(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[TokenizedConversation], *, weight: float, lines: int = 2
) -> list[TokenizedConversation]:
    """The rows with `weight` on each reply's first lines and 1 elsewhere; rows with weights keep theirs."""
    breaks = {id for token, id in tokenizer.get_vocab().items() if "\n" in tokenizer.convert_tokens_to_string([token])}
    weighed: list[TokenizedConversation] = []
    for row in rows:
        if "weights" in row:
            weighed.append(row)
            continue
        weights, left, learning = [], 0, False
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            if label != -100 and not learning:
                left = lines
            learning = label != -100
            weights.append(weight if learning and left > 0 else 1.0)
            left -= token in breaks
        weighed.append({**row, "weights": weights})
    return weighed


def padded(length: int, longest: int | None = None) -> int:
    """The length that rows are padded to: a multiple of 64, at most `longest`.

    On a CPU each new length costs the compilation of its kernels (oneDNN).
    """
    rounded = -(-length // 64) * 64
    return rounded if longest is None else max(length, min(rounded, longest))


def split_passes(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Split rows, by their numbers, into passes of rows of like length, the longest first.

    Args:
        lengths: Of the rows, in tokens.
        tokens: The most that a pass holds, padding included; a longer row has one of its own.
    """
    passes: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if passes and lengths[passes[-1][0]] * (len(passes[-1]) + 1) <= tokens:
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes


def create_collator(
    pad_id: int, longest: int | None = None
) -> Callable[[list[TokenizedConversation]], dict[str, torch.Tensor]]:
    """A data collator that pads rows on the right, to the length that `padded` says."""

    def collate(rows: list[TokenizedConversation]) -> dict[str, torch.Tensor]:
        def pad(values: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
            length = padded(max(map(len, values)), longest)
            return torch.tensor([[*value, *[fill] * (length - len(value))] for value in values], dtype=dtype)

        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": pad(ids, pad_id, torch.long),
            "attention_mask": pad([[1] * len(row) for row in ids], 0, torch.long),
            "labels": pad([row["labels"] for row in rows], -100, torch.long),
            "weights": pad([row["weights"] for row in rows], 0.0, torch.float),
        }

    return collate
