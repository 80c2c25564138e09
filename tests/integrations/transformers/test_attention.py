"""Keys and values of a prompt that a batch's rows share are read once, and the answers stay those of the model."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dreamgym_lg.integrations.transformers import attention, batch
from dreamgym_lg.integrations.transformers.attention import products, shared_prompt

ROWS, PROMPT, SIZE = 5, 70, 64


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(("heads", "kinds"), [(9, 3), (4, 4)])
@pytest.mark.parametrize(("new", "own", "masked"), [(1, 50, True), (7, 50, True), (1, 50, False), (9, 9, False)])
def test_two_sums_are_the_attention_over_all_keys(
    dtype: torch.dtype, tolerance: float, heads: int, kinds: int, new: int, own: int, masked: bool
) -> None:
    torch.manual_seed(0)
    prompt = torch.randn(1, 2, kinds, PROMPT, SIZE).to(dtype)
    query, (key, value) = torch.randn(ROWS, heads, new, SIZE).to(dtype), torch.randn(2, ROWS, kinds, own, SIZE).to(dtype)
    seen = torch.ones(ROWS, 1, new, own, dtype=torch.bool).tril(own - new)
    if masked:
        seen &= torch.rand(ROWS, 1, 1, own) > 0.3
        seen[..., -1, 0] = True
        seen[..., 0] = True
    keys, values = (
        torch.cat([before.expand(ROWS, -1, -1, -1), after], 2).float()
        for before, after in ((prompt[0, 0], key), (prompt[0, 1], value))
    )
    mask = pad(seen, (PROMPT, 0), value=True)
    plain = scaled_dot_product_attention(query.float(), keys, values, attn_mask=mask, scale=0.2, enable_gqa=True)
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(_attn_implementation="sdpa")))
    layer = SimpleNamespace(layer_idx=0, num_key_value_groups=heads // kinds)
    with shared_prompt(model, prompt):
        attend = ALL_ATTENTION_FUNCTIONS["sdpa_shared_prompt"]
        result, _ = attend(layer, query, key, value, seen if masked else None, scaling=0.2)
    torch.testing.assert_close(result.float(), plain.transpose(1, 2), rtol=0, atol=tolerance)
    assert attention._prompt.get() is None


def of(name: str) -> Any:
    return SimpleNamespace(
        device=torch.device("cpu"), config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(_attn_implementation=name))
    )


@pytest.mark.parametrize(("heads", "kinds"), [(9, 3), (4, 4)])
@pytest.mark.parametrize(("length", "keys", "masked"), [(40, 90, True), (40, 90, False), (40, 40, False)])
def test_products_and_their_gradients_are_those_of_attention(
    heads: int, kinds: int, length: int, keys: int, masked: bool
) -> None:
    torch.manual_seed(0)
    shapes = (ROWS, heads, length, SIZE), (ROWS, kinds, keys, SIZE), (ROWS, kinds, keys, SIZE)
    tensors: list[Any] = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    seen = torch.ones(ROWS, 1, length, keys, dtype=torch.bool).tril(keys - length)
    if masked:
        seen &= torch.rand(ROWS, 1, 1, keys) > 0.3
        seen[..., 0] = True
    exact: list[Any] = [each.detach().float().requires_grad_() for each in tensors]
    query, key, value = exact
    plain = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.2, enable_gqa=True).transpose(1, 2)
    layer = SimpleNamespace(num_key_value_groups=heads // kinds)
    result, _ = ALL_ATTENTION_FUNCTIONS["sdpa_products"](layer, *tensors, seen if masked else None, scaling=0.2)
    torch.testing.assert_close(result.float(), plain, rtol=0, atol=0.02)
    upstream = torch.randn(plain.shape)
    result.backward(upstream.bfloat16())
    plain.backward(upstream)
    for ours, theirs in zip(tensors, exact, strict=True):
        assert torch.nn.functional.cosine_similarity(ours.grad.float().flatten(), theirs.grad.flatten(), dim=0) > 0.999


@pytest.mark.parametrize(
    ("dtype", "most", "options"),
    [
        (torch.float32, 1 << 25, {}),
        (torch.bfloat16, 10, {}),
        (torch.bfloat16, 1 << 25, {"position_bias": torch.ones(1, 4, 6, 6)}),
    ],
)
def test_where_products_do_not_fit_attention_is_pytorchs(
    dtype: torch.dtype, most: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytorchs = Mock(side_effect=attention.sdpa_attention_forward)
    monkeypatch.setattr(attention, "sdpa_attention_forward", pytorchs)
    monkeypatch.setattr(attention, "_MAX_SCORES", most)
    query, (key, value) = torch.randn(2, 4, 6, SIZE).to(dtype), torch.randn(2, 2, 2, 6, SIZE).to(dtype)
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    result, _ = ALL_ATTENTION_FUNCTIONS["sdpa_products"](layer, query, key, value, None, scaling=0.2, **options)
    assert result.shape == (2, 6, 4, SIZE) and pytorchs.call_count == 1


@pytest.mark.parametrize(("usual", "within"), [("sdpa", "sdpa_products"), ("eager", "eager")])
def test_a_model_with_an_attention_of_its_own_keeps_it(usual: str, within: str) -> None:
    model = of(usual)
    config = model.config.get_text_config()
    model.config.get_text_config = lambda: config
    with products(model):
        assert config._attn_implementation == within
    assert config._attn_implementation == usual


def row(ids: list[int], known: int) -> Any:
    return SimpleNamespace(ids=ids, known=known)


@pytest.mark.parametrize(
    ("dtype", "rows", "number"),
    [
        (torch.bfloat16, [row([*range(60), 1, 2], 61), row([*range(50), 7, 8], 52)], 50),
        (torch.bfloat16, [row([*range(60)], 60), row([*range(60)], 40)], 40),
        (torch.bfloat16, [row([*range(60)], 60), row([*range(60)], 0)], 0),
        (torch.bfloat16, [row([*range(60)], 60)], 0),
        (torch.float32, [row([*range(60)], 60), row([*range(60)], 60)], 0),
    ],
)
def test_rows_share_what_all_begin_with_and_know(dtype: torch.dtype, rows: list[Any], number: int) -> None:
    text = SimpleNamespace(_attn_implementation="sdpa")
    model = SimpleNamespace(device=torch.device("cpu"), dtype=dtype, config=SimpleNamespace(get_text_config=lambda: text))
    assert batch.shared_tokens(SimpleNamespace(model=model), rows) == number  # type: ignore[arg-type]
