"""The rows of supervised training: conversations as tokens, with what is learned of them and how much it weighs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NotRequired, TypedDict

import torch

from dreamgym_lg.errors import MissingDependency

try:
    from transformers import PreTrainedTokenizerBase
    from trl.chat_template_utils import get_training_chat_template
except ImportError as error:
    raise MissingDependency.extra("trl", "train") from error

Conversation = Sequence[Mapping[str, str]]
"""Messages with `role` and `content`."""


class TokenizedConversation(TypedDict):
    """A row of supervised training; all lists have the length of the conversation in tokens."""

    input_ids: list[int]
    labels: list[int]
    """-100 where nothing is learned."""
    weights: NotRequired[list[float]]
    """The loss weight of each token; 1 without it."""


def tokenize(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], *, everything: bool = False
) -> list[TokenizedConversation]:
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


def reply_lengths(row: TokenizedConversation) -> list[int]:
    """The length of each learned stretch of a conversation in tokens, the token that ends a reply included."""
    return [len(list(part)) for learned, part in groupby(row["labels"], lambda label: label != -100) if learned]


def weigh_first_lines(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[TokenizedConversation], *, lines: int, weight: float
) -> list[TokenizedConversation]:
    """The rows with `weight` on the first `lines` lines of every reply and 1 elsewhere; rows with weights keep theirs."""
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


def only_last_reply(rows: Sequence[TokenizedConversation]) -> list[TokenizedConversation]:
    """The rows with nothing learned but the last reply."""
    cut: list[TokenizedConversation] = []
    for row in rows:
        learned = [label != -100 for label in row["labels"]]
        end = len(learned) - learned[::-1].index(True) if any(learned) else 0
        begin = max((place + 1 for place in range(end) if not learned[place]), default=0)
        labels = [label if begin <= place < end else -100 for place, label in enumerate(row["labels"])]
        cut.append({**row, "labels": labels})
    return cut


def padded(length: int, longest: int | None = None) -> int:
    """The length in tokens that rows are padded to: a multiple of 64, but no more than a model takes.

    On a CPU each new length costs the compilation of its kernels (oneDNN).
    """
    rounded = -(-length // 64) * 64
    return rounded if longest is None else max(length, min(rounded, longest))


def split_passes(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Which rows share a forward and backward pass: rows of like length, the longest first.

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
    """A data collator: rows of tokens padded on the right to one batch, as long as `padded` says; `longest` is the model's."""

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
