"""The beginning that all rows of a batch share (system prompt, tools), computed once."""

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from dreamgym_lg.integrations.transformers.loading import cache_argument

MIN_SHARED_TOKENS = 32
"""Tokens below which a shared beginning is computed with every row."""


class SharedPrefix(NamedTuple):
    """Keys and values of the tokens with which every row begins, gradients included."""

    length: int
    past: DynamicCache | None
    argument: str
    """By which the model takes them."""

    def inputs(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """The model's inputs for (rows, tokens) `ids`, padded on the right. Its outputs begin at token `length`."""
        inputs: dict[str, Any] = {"input_ids": ids[:, self.length :], "use_cache": False}
        if self.past is None:  # no token attends to what is behind it, padding included; a mask would cost half as much again
            return inputs
        return {**inputs, "attention_mask": mask, self.argument: self.past}


def shared_tokens(model: PreTrainedModel, rows: Sequence[Sequence[int]], *, before: int) -> int:
    """Number of tokens that `shared_prefix` computes once for these rows; 0 if too few.

    Args: `before`, the most it can be."""
    if model.training and model.is_activation_checkpointing:
        return 0
    length = len(commonprefix([list(row[:before]) for row in rows]))
    return length if length >= MIN_SHARED_TOKENS else 0


def shared_prefix(model: PreTrainedModel, ids: torch.Tensor, *, before: int, least: int = 0) -> SharedPrefix:
    """The common beginning of the rows of `ids`, at most `before` tokens.

    Nothing is shared by one row, under activation checkpointing, and by a model whose cache does not keep every token.

    Args: `ids`, (rows, tokens), padded on the right if at all. `least`, tokens below which a beginning is not shared; never
    fewer than `MIN_SHARED_TOKENS`.
    """
    length, argument = 0, cache_argument(model)
    if len(ids) > 1 and not (model.training and model.is_activation_checkpointing):
        differs = (ids[:, :before] != ids[:1, :before]).any(dim=0)
        length = int(differs.int().argmax()) if differs.any() else differs.numel()
    if length < max(least, MIN_SHARED_TOKENS):
        return SharedPrefix(0, None, argument)
    past = DynamicCache(config=model.config)
    if any(type(layer) is not DynamicLayer for layer in past.layers):
        return SharedPrefix(0, None, argument)
    model(input_ids=ids[:1, :length], use_cache=True, logits_to_keep=1, **{argument: past})
    past.batch_repeat_interleave(len(ids))
    return SharedPrefix(length, past, argument)
