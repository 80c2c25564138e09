"""Whatever is batched and cached, the answers are those of the model, and an episode's tokens are one run."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    set_seed,
)

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Segment

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
NARROW = {**SIZE, "num_key_value_heads": 2, "intermediate_size": 96}
FAMILIES = {
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=512),
    "llama": LlamaConfig(**NARROW),
    "mistral": MistralConfig(**NARROW, sliding_window=None),
    "mistral with a window as good as none": MistralConfig(**NARROW, sliding_window=1024),
    "qwen2": Qwen2Config(**NARROW),
    "qwen3": Qwen3Config(**NARROW, head_dim=32),
}
WINDOWED = {
    "gemma2": Gemma2Config(**NARROW, head_dim=16, sliding_window=16),
    "mistral": MistralConfig(**NARROW, sliding_window=16),
    "mistral whose window is longer than a conversation but not than a batch": MistralConfig(**NARROW, sliding_window=512),
    "qwen2": Qwen2Config(**NARROW, use_sliding_window=True, sliding_window=16, max_window_layers=1),
}


def of_family(config: Any, tokenizer: PreTrainedTokenizerFast) -> LocalChatModel:
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, value in {**ids, "bos_token_id": None, "initializer_range": 0.08}.items():
        setattr(config, name, value)
    set_seed(0)
    return LocalChatModel(model=AutoModelForCausalLM.from_config(config).eval(), tokenizer=tokenizer, max_new_tokens=12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.usefixtures("patient")
async def test_cached_batches_of_many_conversations_are_exact(
    policy: LocalChatModel, temperature: float, converse_all: Callable[..., Any], forward_error: Callable[..., float]
) -> None:
    policy = policy.with_temperature(temperature)
    recorders = await converse_all(policy, 16, turns=4)
    for recorder in recorders:
        (segment,) = recorder.segments()
        assert segment.trainable == sum(len(call.sampled_ids) for call in recorder.calls) >= 4
        assert forward_error(policy, segment) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_is_exact(
    family: str, tokenizer: PreTrainedTokenizerFast, converse_all: Callable[..., Any], forward_error: Callable[..., float]
) -> None:
    policy = of_family(FAMILIES[family], tokenizer)
    for recorder in await converse_all(policy, 8, turns=3):
        (segment,) = recorder.segments()
        assert forward_error(policy, segment) < 1e-4


@pytest.mark.parametrize("family", WINDOWED)
def test_attention_that_a_batch_would_change_is_refused(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigurationError, match=r"sliding_attention, sliding_window=\d+"):
        of_family(WINDOWED[family], tokenizer)


async def test_greedy_answers_are_those_of_generate(policy: LocalChatModel, converse_all: Callable[..., Any]) -> None:
    greedy = policy.with_temperature(0)
    for recorder in await converse_all(greedy, 6, turns=2):
        for call in recorder.calls:
            given = torch.tensor([call.prompt_ids])
            out = policy.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
            assert out[0, given.shape[1] :].tolist() == call.sampled_ids
            assert call.temperature == 0


async def test_temperature_zero_repeats_itself(policy: LocalChatModel, opening: Callable[[int], list[BaseMessage]]) -> None:
    greedy = policy.with_temperature(0)
    alone = [(await greedy.ainvoke(opening(i))).text for i in range(4)]
    together = await asyncio.gather(*(greedy.ainvoke(opening(i)) for i in range(4)))
    assert [message.text for message in together] == alone


@pytest.mark.parametrize("dropped", [True, False])
async def test_changed_weights_answer_at_once_if_the_cache_is_dropped(
    policy: LocalChatModel, dropped: bool, opening: Callable[[int], list[BaseMessage]], forward_error: Callable[..., float]
) -> None:
    with TokenRecorder(seed=1) as recorder:
        messages = opening(3)
        messages += [await policy.ainvoke(messages), HumanMessage("and now?")]
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.3)
        if dropped:
            policy.weights_changed()
        await policy.ainvoke(messages)
    given, sampled, logprobs = recorder.calls[-1][1:4]
    masked = [0] * len(given) + [1] * len(sampled), [0.0] * len(given) + list(logprobs)
    segment = Segment(token_ids=[*given, *sampled], sampled=masked[0], logprobs=masked[1])
    assert (forward_error(policy, segment) < 1e-4) == dropped


async def test_training_mode_is_left_as_it_was_and_does_not_reach_the_answers(
    policy: LocalChatModel, opening: Callable[[int], list[BaseMessage]]
) -> None:
    before = await policy.ainvoke(opening(1), seed=0)
    policy.model.config.attention_dropout = 0.5
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy.model.train()
    assert (await policy.ainvoke(opening(1), seed=0)).text == before.text
    with pytest.raises(ConfigurationError):  # once the next call is read, the batch before is over
        await policy.ainvoke([HumanMessage("the kitchen " * 300)])
    assert policy.model.training


async def test_special_tokens_and_invalid_utf8_inside_a_reply_keep_one_segment(
    policy: LocalChatModel, tokenizer: PreTrainedTokenizerFast, converse_all: Callable[..., Any]
) -> None:
    recorders = await converse_all(policy, 24, turns=3)
    replies = [call.sampled_ids for recorder in recorders for call in recorder.calls]
    specials = set(tokenizer.convert_tokens_to_ids(["<|user|>", "<|system|>", "<|assistant|>", "<|pad|>"]))
    assert any(specials & set(reply) for reply in replies), "a case was sampled"
    assert any("\ufffd" in tokenizer.decode(reply) for reply in replies), "a case was sampled"
    assert {len(recorder.segments()) for recorder in recorders} == {1}


async def test_conversations_with_the_same_words_keep_their_own_tokens(
    policy: LocalChatModel,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    opening: Callable[[int], list[BaseMessage]],
    forward_error: Callable[..., float],
) -> None:
    """Replies that read alike may have been sampled as different tokens, e.g. "apple" whole and letter by letter."""
    decode = tokenizer.decode

    def all_alike(ids: Any, **kwargs: Any) -> Any:
        return "take" if len(ids) > 1 else decode(ids, **kwargs)

    monkeypatch.setattr(tokenizer, "decode", all_alike)

    async def episode(seed: int) -> TokenRecorder:
        with TokenRecorder(seed=seed) as recorder:
            messages = opening(2)
            for _ in range(3):
                messages += [await policy.ainvoke(messages), HumanMessage("and now?")]
        assert messages[2].text == messages[4].text == messages[6].text == "take"
        return recorder

    recorders = await asyncio.gather(*(episode(seed) for seed in range(8)))
    assert {len(recorder.segments()) for recorder in recorders} == {1}
    assert max(forward_error(policy, recorder.segments()[0]) for recorder in recorders) < 1e-4


async def test_an_edited_conversation_is_a_segment_of_its_own(
    policy: LocalChatModel, opening: Callable[[int], list[BaseMessage]], forward_error: Callable[..., float]
) -> None:
    with TokenRecorder(seed=0) as recorder:
        messages = opening(1)
        await policy.ainvoke(messages)
        await policy.ainvoke([*messages, AIMessage("something it never said"), HumanMessage("so?")])
    first, second = recorder.segments()
    assert max(forward_error(policy, first), forward_error(policy, second)) < 1e-4
