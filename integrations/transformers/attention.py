"""Attention in bfloat16 on a CPU: over a prompt that rows share, and with gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME, _PRODUCTS = "sdpa_shared_prompt", "sdpa_products"
_MAX_SCORES = 1 << 25
"""Above, attention with gradients is PyTorch's own. Products keep two bytes of each score in every layer."""
_prompt = ContextVar[torch.Tensor | None]("prompt", default=None)


def can_share(model: PreTrainedModel) -> bool:
    """True where a batch gains by sharing. In bfloat16 on a CPU, reading keys and values takes most of the time."""
    usual = model.config.get_text_config()._attn_implementation == "sdpa"
    return usual and model.device.type == "cpu" and model.dtype == torch.bfloat16


@contextmanager
def shared_prompt(model: PreTrainedModel, keys_values: torch.Tensor | None) -> Iterator[None]:
    """Puts keys and values that every position sees before those of each row.

    Args: `keys_values`, [layers, 2, heads, tokens, head size]; None: nothing is shared.
    """
    if keys_values is None:
        yield
        return
    token = _prompt.set(keys_values)
    try:
        with _implementation(model, _NAME):
            yield
    finally:
        _prompt.reset(token)


@contextmanager
def products(model: PreTrainedModel) -> Iterator[None]:
    """Passes with gradients compute attention by matrix products. In bfloat16 that is a third of the time of PyTorch's own."""
    usual = model.config.get_text_config()._attn_implementation
    with _implementation(model, _PRODUCTS if usual == "sdpa" and model.device.type == "cpu" else usual):
        yield


@contextmanager
def _implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    config = model.config.get_text_config()
    usual, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = usual


def _attend_with_prompt(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """As `sdpa_attention_forward`, over the shared prompt and the row's own keys. Two softmax sums, joined exactly."""
    if (shared := _prompt.get()) is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    rows, heads, length, size = query.shape
    key_heads = key.shape[1]  # each serves several heads of queries
    queries = query.reshape(rows, key_heads, -1, length, size)
    prompt_keys, prompt_values = shared[cast(int, module.layer_idx)][:, None]
    of_all_rows = queries.movedim(0, 2).reshape(1, key_heads, -1, size)
    prompt, prompt_sum = _attention_and_sums(of_all_rows, prompt_keys, prompt_values, scale=scaling)
    shape = key_heads, -1, rows, length
    prompt, prompt_sum = prompt.view(*shape, size).movedim(2, 0), prompt_sum.reshape(shape).movedim(2, 0)
    if attention_mask is not None:
        attention_mask = _additive(attention_mask, query.dtype)
    if length == 1:  # the queries of one key as rows of one product
        own, own_sum = _attention_and_sums(queries[..., 0, :], key, value, attn_mask=attention_mask, scale=scaling)
        own, own_sum = own[..., None, :], own_sum[..., None]
    else:
        options = {"is_causal": attention_mask is None, "attn_mask": attention_mask, "scale": scaling}
        parts = [_attention_and_sums(part, key, value, **options) for part in queries.unbind(2)]
        own, own_sum = (torch.stack(each, 2) for each in zip(*parts, strict=True))
    share = torch.sigmoid(prompt_sum - own_sum)[..., None]
    joined = torch.lerp(own.float(), prompt.float(), share).to(query.dtype)
    return joined.view(rows, heads, length, size).transpose(1, 2).contiguous(), None


def _attention_and_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, [rows, heads, length, size], and the logarithms of its sums, float32, [rows, heads, length]."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, **options)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as numbers to add to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _attend_by_products(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`sdpa_attention_forward` by matrix products, in bfloat16; else itself. Queries of one key are rows of one product."""
    rows, heads, length, size = query.shape
    key_heads, keys = key.shape[1:3]
    special = options.get("dropout") or any(options.get(name) is not None for name in ("position_bias", "softcap"))
    if special or query.dtype != torch.bfloat16 or rows * heads * length * keys > _MAX_SCORES:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if attention_mask is None:
        attention_mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    scaled = query * (size**-0.5 if scaling is None else scaling)
    scores = (scaled.reshape(rows, key_heads, -1, size) @ key.transpose(-1, -2)).view(rows, heads, length, keys)
    shares = scores.add_(_additive(attention_mask, query.dtype)).softmax(-1)
    mixed = shares.view(rows, key_heads, -1, keys) @ value
    return mixed.view(rows, heads, length, size).transpose(1, 2).contiguous(), None


for _name, _function in ((_NAME, _attend_with_prompt), (_PRODUCTS, _attend_by_products)):
    ALL_ATTENTION_FUNCTIONS.register(_name, _function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, sdpa_mask)
