"""The estimate of memory against numbers worked out by hand, and against what a small model takes."""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_parts import groups_of, learner_of, model_of
from peft import get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from trl.trainer.utils import add_fused_lm_head

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl import memory, policy_learner
from dreamgym_lg.integrations.trl.adapters import default_adapters
from dreamgym_lg.integrations.trl.memory import MemoryEstimate, estimate_memory

QWEN_7B = Qwen2Config(
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
PARAMETERS = 7_615_616_512
"""As its makers say."""


def test_whole_weights_of_a_7b_model() -> None:
    found = estimate_memory(QWEN_7B)
    assert found.weights == found.reference == found.gradients == 4 * PARAMETERS
    assert found.optimizer == 8 * PARAMETERS
    # attention: queries and outputs, keys and values; then the three matrices of the MLP
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18_944)
    assert found.copies == 2 * matrices
    assert found.update > 141e9, "it does not fit on an H200"
    assert estimate_memory(QWEN_7B, reference=False).reference == 0


def test_adapters_of_a_7b_model() -> None:
    found = estimate_memory(QWEN_7B, dtype=torch.bfloat16, peft_config=default_adapters(), tokens=8192, cached_tokens=64 * 4096)
    inputs_and_outputs = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944)
    adapters = 28 * 16 * inputs_and_outputs
    assert adapters == 40_370_176
    assert found.weights == 2 * PARAMETERS + 4 * adapters
    assert (found.reference, found.copies, found.gradients, found.optimizer) == (0, 0, 4 * adapters, 8 * adapters)
    assert found.cache == 64 * 4096 * 57_344, "28 layers, keys and values, 4 heads of 128, 2 bytes"
    # a checkpoint of 2 bytes after each layer; 2 norms in float32, 5 copies of their outputs, attention, MLP, ranks
    layer = 4 * 2 * 3584 + 2 * (5 * 3584 + 3 * 3584 + 2 * 512 + 4 * 18_944 + 7 * 16)
    head = 4 * 4 * 3584 * 8192 + 4096 * 32_768 * 2
    assert found.activations == 8192 * (28 * 2 * 3584 + 2 * layer) + head
    assert found.update < 24e9 and found.peak == found.rollout


def saved_for_backward(model: Any, ids: torch.Tensor) -> int:
    """Bytes that autograd keeps of a forward pass, the model's own weights left out."""
    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for place, size in found.items() if place not in own)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(
    ("dtype", "autocast", "lora"),
    [
        (torch.float32, False, False),
        (torch.float32, False, True),
        (torch.float32, True, False),
        (torch.float32, True, True),
        (torch.bfloat16, True, True),
    ],
)
def test_activations_are_what_autograd_keeps(heads: int, dtype: torch.dtype, autocast: bool, lora: bool) -> None:
    """Of four layers: what more layers take."""
    ids = torch.arange(200).view(2, 100)
    options: Any = {"dtype": dtype, "peft_config": default_adapters() if lora else None, "tokens": 200, "autocast": autocast}
    for checkpointing, error in ((False, 0.07), (True, 1e-9)):
        measured, estimated = list[int](), list[int]()
        for layers in (2, 6):
            config = Qwen2Config(
                vocab_size=300,
                hidden_size=64,
                intermediate_size=160,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=heads,
            )
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
            add_fused_lm_head(model)
            model = get_peft_model(model, default_adapters()) if lora else model
            if checkpointing:
                model.activation_checkpointing_enable()
                model.enable_input_require_grads()
            with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
                measured.append(saved_for_backward(model, ids))
            found = estimate_memory(config, **options, checkpointing=checkpointing)
            estimated.append(found.activations + (0 if checkpointing else found.copies))
        assert estimated[1] - estimated[0] == pytest.approx(measured[1] - measured[0], rel=error)


@pytest.mark.parametrize("lora", [False, True])
def test_weights_gradients_and_optimizer_of_a_learner(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[MemoryEstimate] = []
    monkeypatch.setattr(policy_learner, "check_memory", lambda estimate, *_, **__: found.append(estimate))
    model = model_of(tokenizer)
    learner = learner_of(model, tokenizer, tmp_path, peft_config=default_adapters() if lora else None)
    learner.update(groups_of(model_of(tokenizer), 0))
    learner.close()
    parameters = list(model.parameters())
    assert found[0].weights == sum(each.nbytes for each in parameters)
    assert found[0].gradients == sum(each.nbytes for each in parameters if each.requires_grad)
    states = learner._trainer.optimizer.state_dict()["state"].values()
    assert found[0].optimizer == sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))
    assert (found[0].reference, found[0].copies, found[0].cache) == (0, 0, 0), "beta=0, no autocast on the CPU"


def test_the_cache_is_the_engines(tokenizer: PreTrainedTokenizerFast) -> None:
    policy = LocalChatModel(model=model_of(tokenizer), tokenizer=tokenizer, max_new_tokens=8)
    reply = policy.invoke("say a colour")
    assert reply.usage_metadata is not None
    engine: Any = policy.engine
    tokens = reply.usage_metadata["input_tokens"] + 8
    found = estimate_memory(policy.model.config, cached_tokens=tokens, autocast=False)  # type: ignore[union-attr]
    assert engine._decoder._buffer.nbytes == found.cache


def test_what_cannot_fit_is_refused_with_what_helps(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_room", lambda _: 100_000)
    told = (
        "an update needs .*weights.*gradients.*optimizer.*; cpu has 0.1 MB. What helps: lora=True.*micro_batch_tokens than 8192"
    )
    with pytest.raises(ConfigurationError, match=told):
        learner_of(model_of(tokenizer), tokenizer, tmp_path)
    with pytest.raises(ConfigurationError, match='What helps: dtype="bfloat16"') as refused:
        learner_of(model_of(tokenizer), tokenizer, tmp_path, peft_config=default_adapters())
    assert "lora" not in str(refused.value)
    monkeypatch.setattr(memory, "_room", lambda _: 1_000_000_000)
    learner_of(model_of(tokenizer), tokenizer, tmp_path)


def test_what_an_update_needs_is_said_of_large_models(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger=policy_learner.logger.name):
        learner_of(model_of(tokenizer), tokenizer, tmp_path)
        assert not caplog.records
        monkeypatch.setattr(policy_learner, "FROM_SCRATCH_MAX_PARAMETERS", 1000)
        learner_of(model_of(tokenizer), tokenizer, tmp_path)
    assert "an update on cpu needs" in caplog.text and "weights" in caplog.text
