"""Keys and values of a prompt that a batch's rows share are read once, and the answers stay those of the model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dreamgym_lg.integrations.transformers import attention, batch
from dreamgym_lg.integrations.transformers.attention import shared_prompt

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
