"""What all rows of a batch begin with is computed once: the gradient is that of the whole rows."""

from dataclasses import replace
from inspect import unwrap
from pathlib import Path
from types import MethodType

import pytest
import torch
from grpo_parts import learner_of, model_of, row, segment
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dreamgym_lg.integrations.trl import sft
from dreamgym_lg.integrations.trl import shared_prefix as module
from dreamgym_lg.integrations.trl.options import StepOptions
from dreamgym_lg.integrations.trl.sft import train_sft
from dreamgym_lg.integrations.trl.shared_prefix import MIN_SHARED_TOKENS, shared_prefix, shared_tokens
from dreamgym_lg.integrations.trl.token_trainer import TokenTrainer
from dreamgym_lg.learner import sft_row
from dreamgym_lg.types import Segment

SHARED = list(range(10, 10 + 2 * MIN_SHARED_TOKENS))


def tokens_computed(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward pass of the model is given."""
    given: list[int] = []
    monkeypatch.setattr(
        model.model,
        "forward",
        lambda *args, real=model.model.forward, **kw: given.append(kw["input_ids"].numel()) or real(*args, **kw),
    )
    return given


def test_a_step_computes_attention_by_products(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tokenizer).eval()
    learner, rows = learner_of(model, tokenizer, tmp_path), [row(segment(model, i), 1.0, 2) for i in range(2)]
    names, real = set[str](), model.model.forward

    def forward(*args: object, **options: object) -> object:
        names.add(model.config._attn_implementation)
        return real(*args, **options)

    monkeypatch.setattr(model.model, "forward", forward)
    learner._trainer.step(rows)
    assert names == {"sdpa_products"} and model.config._attn_implementation == "sdpa"


def test_grpo_computes_a_shared_beginning_once_and_its_gradient_is_the_same(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tokenizer).eval()
    learner = learner_of(model, tokenizer, tmp_path)

    def begun(i: int) -> object:
        one = segment(model, i)
        nothing = [0] * len(SHARED)
        given = {
            "token_ids": SHARED + one.token_ids,
            "sampled": nothing + one.sampled,
            "logprobs": [*map(float, nothing), *one.logprobs],
        }
        return row(replace(one, **given), 0.5 * i - 0.6, 4)

    rows = [begun(i) for i in range(4)]

    def gradient() -> torch.Tensor:
        learner._trainer._backward(rows, 1.0)
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        model.zero_grad()
        return found

    computed = tokens_computed(model, monkeypatch)
    once = gradient()
    few, _ = sum(computed), computed.clear()
    learner._trainer.micro_batch_tokens = 1
    assert len(learner._trainer.passes([each.segment for each in rows])) == 4
    assert torch.allclose(once, gradient(), atol=1e-5), "in four passes"
    in_passes, _ = sum(computed), computed.clear()
    monkeypatch.setattr(module, "MIN_SHARED_TOKENS", 10**6)
    whole = gradient()
    assert whole.abs().max() > 1e-3 and torch.allclose(once, whole, atol=1e-5)
    assert sum(computed) - in_passes == 3 * len(SHARED), "computed once, in however many passes"
    assert in_passes <= few, "without padding"


def test_supervised_training_on_a_shared_beginning_ends_in_the_same_weights(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "precision", lambda *_, **__: {"bf16": False})
    rows = []
    for i in range(4):
        ids, own = [*SHARED, 5 + i, *range(100, 110 + i)], [*[0] * len(SHARED), 1, 0, 0, 0, *[1] * (7 + i)]
        rows.append(sft_row(Segment(token_ids=ids, sampled=own, logprobs=[0.0] * len(ids), temperature=1.0)))

    def trained() -> torch.Tensor:
        model = model_of(tokenizer)
        train_sft(model, rows, steps=3, batch_size=4, learning_rate=1e-2)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    once = trained()
    monkeypatch.setattr(module, "MIN_SHARED_TOKENS", 10**6)
    assert torch.allclose(once, trained(), atol=1e-4)


def test_no_pass_is_too_large_under_checkpointing_where_nothing_is_shared(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step too, before which the model has sampled."""
    ids, own = [*SHARED, 5, 6], [*[0] * len(SHARED), 1, 1]
    rows = [sft_row(Segment(token_ids=ids, sampled=own, logprobs=[0.0] * len(ids), temperature=1.0))] * 4
    model = model_of(tokenizer).eval()
    options = StepOptions(loss="likelihood", learning_rate=1e-3, activation_checkpointing=True)
    trainer = TokenTrainer(model, options, micro_batch_tokens=len(ids))
    computed = tokens_computed(model, monkeypatch)
    trainer.step(rows)
    assert max(computed) <= len(ids)


def test_what_is_shared_ends_before_the_first_token_that_is_needed_and_at_the_first_difference(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = model_of(tokenizer)
    rows = [[*SHARED, 7, 8], [*SHARED, 9, 8]]
    assert shared_tokens(model, rows, before=10**6) == len(SHARED)
    assert shared_tokens(model, rows, before=MIN_SHARED_TOKENS) == MIN_SHARED_TOKENS
    assert shared_tokens(model, rows, before=MIN_SHARED_TOKENS - 1) == 0
    assert shared_tokens(model, rows[:1], before=MIN_SHARED_TOKENS) == 0
    assert shared_tokens(model, [*rows, SHARED * 5], before=10**6) == 0, "less than a quarter of the longest"
    model.train().activation_checkpointing_enable()
    assert shared_tokens(model, rows, before=MIN_SHARED_TOKENS) == 0


def test_a_model_whose_forward_accelerate_has_unwrapped_still_takes_the_shared_beginning(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """A trainer's end takes the decorators off `forward`, and with them the renaming of arguments that were renamed."""
    model = model_of(tokenizer).eval()
    ids = torch.tensor([[*SHARED, 7, 8], [*SHARED, 9, 8]])
    expected = model(input_ids=ids).logits[:, len(SHARED) :]
    model.forward = MethodType(unwrap(model.forward.__func__), model)
    prefix = shared_prefix(model, SHARED)
    assert prefix.length == prefix.layers[0][0].size(2) == len(SHARED)
    output = model(**prefix.inputs(model, ids, torch.ones_like(ids)), return_dict=True)
    assert torch.allclose(output.logits, expected, atol=1e-5)
