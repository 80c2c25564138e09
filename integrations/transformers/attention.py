"""Attention over the prompt that all rows of a batch share. Its keys and values are read once."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "sdpa_shared_prompt"
_prompt = ContextVar[torch.Tensor | None]("prompt", default=None)


def can_share(model: PreTrainedModel) -> bool:
    """True where a batch gains by it. PyTorch's own attention in bfloat16 on a CPU is bound by reading keys and values."""
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
    config, token = model.config.get_text_config(), _prompt.set(keys_values)
    usual, config._attn_implementation = config._attn_implementation, _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        _prompt.reset(token)


def _attend(
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
    kinds = key.shape[1]  # heads of keys and values; each serves several of the queries'
    queries = query.reshape(rows, kinds, -1, length, size)
    before, after = shared[cast(int, module.layer_idx)], (key, value)
    at_once = queries.movedim(0, 2).reshape(1, kinds, -1, size)
    prompt, prompt_sum = _softmax(at_once, before[0, None], before[1, None], scale=scaling)
    shape = kinds, -1, rows, length
    prompt, prompt_sum = prompt.view(*shape, size).movedim(2, 0), prompt_sum.reshape(shape).movedim(2, 0)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, -torch.inf)
    if length == 1:  # the queries of one key as rows of one product
        own, own_sum = _softmax(queries[..., 0, :], *after, attn_mask=attention_mask, scale=scaling)
        own, own_sum = own[..., None, :], own_sum[..., None]
    else:
        options = {"is_causal": attention_mask is None, "attn_mask": attention_mask, "scale": scaling}
        parts = [_softmax(part, *after, **options) for part in queries.unbind(2)]
        own, own_sum = (torch.stack(each, 2) for each in zip(*parts, strict=True))
    share = torch.sigmoid(prompt_sum - own_sum)[..., None]
    joined = torch.lerp(own.float(), prompt.float(), share).to(query.dtype)
    return joined.view(rows, heads, length, size).transpose(1, 2).contiguous(), None


def _softmax(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, [rows, heads, length, size], and the logarithms of its sums, float32, [rows, heads, length]."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: tuple[torch.Tensor, torch.Tensor] = attention(query, key, value, **options)
    return result


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, sdpa_mask)
