"""The beginning that all rows of a batch share, computed once: an agent's system prompt and tools are half of its rows."""

from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from dreamgym_lg.integrations.transformers.loading import cache_argument

LEAST = 32
"""Tokens below which a shared beginning is computed with every row."""


class SharedPrefix(NamedTuple):
    """Keys and values of the tokens with which every row begins, gradients included."""

    length: int
    past: DynamicCache | None
    argument: str
    """By which the model takes them."""

    def inputs(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """What the model is given for (rows, tokens) `ids`, padded on the right: its outputs begin at token `length`."""
        given: dict[str, Any] = {"input_ids": ids[:, self.length :], "use_cache": False}
        if self.past is None:  # no token attends to what is behind it, padding included; a mask would cost half as much again
            return given
        return {**given, "attention_mask": mask, self.argument: self.past}


def shared_prefix(model: PreTrainedModel, ids: torch.Tensor, *, before: int, least: int = 0) -> SharedPrefix:
    """What the rows of `ids` (rows, tokens; padded on the right at most) begin with, up to `before` tokens.

    Nothing is shared by one row, under activation checkpointing, and by a model whose cache does not keep every token.

    Args: `least`, tokens below which a beginning is not shared; never fewer than `LEAST`.
    """
    length, argument = 0, cache_argument(model)
    if len(ids) > 1 and not (model.training and model.is_activation_checkpointing):
        differs = (ids[:, :before] != ids[:1, :before]).any(dim=0)
        length = int(differs.int().argmax()) if differs.any() else differs.numel()
    if length < max(least, LEAST):
        return SharedPrefix(0, None, argument)
    past = DynamicCache(config=model.config)
    if any(type(layer) is not DynamicLayer for layer in past.layers):
        return SharedPrefix(0, None, argument)
    model(input_ids=ids[:1, :length], use_cache=True, logits_to_keep=1, **{argument: past})
    past.batch_repeat_interleave(len(ids))
    return SharedPrefix(length, past, argument)
