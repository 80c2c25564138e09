"""The beginning that all rows of a step share (system prompt, tools), computed once."""

from collections.abc import Sequence
from itertools import chain
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

MIN_SHARED_TOKENS = 32
"""Tokens below which a shared beginning is computed with every row."""


class SharedPrefix(NamedTuple):
    """Keys and values of the tokens with which every row begins, gradients included."""

    length: int
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer, of one row."""

    def inputs(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """The model's inputs for (rows, tokens) `ids`, padded on the right. Its outputs begin at token `length`."""
        inputs: dict[str, Any] = {"input_ids": ids[:, self.length :], "use_cache": False}
        if not self.layers:  # no token attends to what is behind it, padding included; a mask would cost half as much again
            return inputs
        past = DynamicCache(config=model.config)
        for i, (keys, values) in enumerate(self.layers):
            past.update(keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1), i)
        return {**inputs, "attention_mask": mask, "cache": past}

    def detached(self) -> "SharedPrefix":
        """The same numbers as leaves, which collect the gradients of several passes for `backward`."""
        return self._replace(layers=[(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in self.layers])

    def backward(self, leaves: "SharedPrefix") -> None:
        """Carry the gradients that the `leaves` have collected on to the model's parameters."""
        pairs = zip(chain.from_iterable(self.layers), chain.from_iterable(leaves.layers), strict=True)
        used = [(output, leaf.grad) for output, leaf in pairs if leaf.grad is not None and output.requires_grad]
        if used:
            torch.autograd.backward([output for output, _ in used], [gradient for _, gradient in used])


def shared_tokens(model: PreTrainedModel, rows: Sequence[Sequence[int]], *, before: int) -> int:
    """Number of first tokens that are computed once for all rows.

    Nothing is shared by one row, under activation checkpointing, by a model whose cache does not keep every token, and where it
    is less than a quarter of the longest row: attention with a mask costs more than the tokens.

    Args: `before`, the most it can be.
    """
    if len(rows) < 2 or (model.training and model.is_activation_checkpointing):
        return 0
    length = len(commonprefix([list(row[:before]) for row in rows]))
    if length < max(MIN_SHARED_TOKENS, max(map(len, rows)) // 4):
        return 0
    return length if all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers) else 0


def shared_prefix(model: PreTrainedModel, ids: Sequence[int]) -> SharedPrefix:
    """Keys and values of these tokens. Of none: nothing is shared."""
    if not ids:
        return SharedPrefix(0, ())
    past = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=True, logits_to_keep=1, cache=past)
    return SharedPrefix(len(ids), [(layer.keys, layer.values) for layer in past.layers])
