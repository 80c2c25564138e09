"""`LocalChatModel` and its engine: whatever is batched, cached, streamed or seeded, the answers are those of the model."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_tests.unit_tests import ChatModelUnitTests
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
from dreamgym_lg.integrations import transformers_engine
from dreamgym_lg.integrations.transformers import LocalChatModel
from dreamgym_lg.integrations.transformers_engine import Generated, Request
from dreamgym_lg.integrations.transformers_scratch import create_model, create_tokenizer
from dreamgym_lg.policy import TokenRecorder
from dreamgym_lg.types import Segment

TEXTS = [
    "You are in the kitchen. There is a red apple on the table.",
    "take the apple",
    "put the apple in the fridge – très bien, 料理",
]
WORDS = ["the", "kitchen", "holds", "a", "red", "apple", "on", "its", "table", "and", "you", "take", "it"]
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


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than `IDLE_SECONDS` to make the calls that belong together."""
    monkeypatch.setattr(transformers_engine, "IDLE_SECONDS", 0.1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tokenizer(TEXTS, vocab_size=320)


@pytest.fixture
def policy(tokenizer: PreTrainedTokenizerFast) -> LocalChatModel:
    model = create_model(tokenizer, hidden_size=64, layers=2, max_tokens=512)
    return LocalChatModel(model=model, tokenizer=tokenizer, name_or_path="tiny", max_new_tokens=12)


def of_family(config: Any, tokenizer: PreTrainedTokenizerFast) -> LocalChatModel:
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, value in {**ids, "bos_token_id": None, "initializer_range": 0.08}.items():
        setattr(config, name, value)
    set_seed(0)
    return LocalChatModel(model=AutoModelForCausalLM.from_config(config).eval(), tokenizer=tokenizer, max_new_tokens=12)


def opening(i: int) -> list[BaseMessage]:
    """Conversations of many lengths, none like another."""
    return [SystemMessage("Answer."), HumanMessage(" ".join(WORDS[j % len(WORDS)] for j in range(i, 3 * i + 2)) + f" {i}")]


async def converse(policy: BaseChatModel, i: int, *, turns: int, seed: int | None = None) -> TokenRecorder:
    with TokenRecorder(seed=seed) as recorder:
        messages = opening(i)
        for turn in range(turns):
            messages += [await policy.ainvoke(messages), HumanMessage(" ".join(WORDS[: (i * (turn + 3)) % 11]) + " then?")]
    return recorder


async def converse_all(policy: BaseChatModel, n: int, *, turns: int) -> list[TokenRecorder]:
    return await asyncio.gather(*(converse(policy, i, turns=turns, seed=i) for i in range(n)))


@torch.no_grad()
def forward_error(policy: LocalChatModel, segment: Segment) -> float:
    """How far the recorded log-probabilities are from those of one plain forward pass over the segment."""
    ids = torch.tensor([segment.token_ids])
    logits = policy.model.eval()(ids).logits[0, :-1].float() / (policy.temperature or 1)
    truth = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    chosen = torch.tensor(segment.sampled[1:]).bool()
    return float((truth - torch.tensor(segment.logprobs[1:]))[chosen].abs().max())


@contextmanager
def counted_forwards(model: Any) -> Iterator[list[int]]:
    """The batch size of every forward pass made meanwhile."""
    sizes: list[int] = []

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        sizes.append(len(kwargs["input_ids"]))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield sizes
    finally:
        hook.remove()


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_cached_batches_of_many_conversations_are_exact(policy: LocalChatModel, temperature: float) -> None:
    policy = policy.with_temperature(temperature)
    recorders = await converse_all(policy, 16, turns=4)
    for recorder in recorders:
        (segment,) = recorder.segments()
        assert segment.trainable == sum(len(call.sampled_ids) for call in recorder.calls) >= 4
        assert forward_error(policy, segment) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_is_exact(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    policy = of_family(FAMILIES[family], tokenizer)
    for recorder in await converse_all(policy, 8, turns=3):
        (segment,) = recorder.segments()
        assert forward_error(policy, segment) < 1e-4


@pytest.mark.parametrize("family", WINDOWED)
def test_attention_that_a_batch_would_change_is_refused(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigurationError, match=r"sliding_attention, sliding_window=\d+"):
        of_family(WINDOWED[family], tokenizer)


async def test_greedy_answers_are_those_of_generate(policy: LocalChatModel) -> None:
    greedy = policy.with_temperature(0)
    for recorder in await converse_all(greedy, 6, turns=2):
        for call in recorder.calls:
            given = torch.tensor([call.given_ids])
            out = policy.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
            assert out[0, given.shape[1] :].tolist() == call.sampled_ids


async def test_temperature_zero_repeats_itself(policy: LocalChatModel) -> None:
    greedy = policy.with_temperature(0)
    alone = [(await greedy.ainvoke(opening(i))).text for i in range(4)]
    together = await asyncio.gather(*(greedy.ainvoke(opening(i)) for i in range(4)))
    assert [message.text for message in together] == alone


@pytest.mark.parametrize("dropped", [True, False])
async def test_changed_weights_answer_at_once_if_the_cache_is_dropped(policy: LocalChatModel, dropped: bool) -> None:
    with TokenRecorder(seed=1) as recorder:
        messages = opening(3)
        messages += [await policy.ainvoke(messages), HumanMessage("and now?")]
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.3)
        if dropped:
            policy.weights_changed()
        await policy.ainvoke(messages)
    given, sampled, logprobs = recorder.calls[-1][1:]
    masked = [0] * len(given) + [1] * len(sampled), [0.0] * len(given) + list(logprobs)
    segment = Segment(token_ids=[*given, *sampled], sampled=masked[0], logprobs=masked[1])
    assert (forward_error(policy, segment) < 1e-4) == dropped


async def test_training_mode_is_left_as_it_was_and_does_not_reach_the_answers(policy: LocalChatModel) -> None:
    before = await policy.ainvoke(opening(1), seed=0)
    policy.model.config.attention_dropout = 0.5
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy.model.train()
    assert (await policy.ainvoke(opening(1), seed=0)).text == before.text
    with pytest.raises(ConfigurationError):  # once the next call is read, the batch before is over
        await policy.ainvoke([HumanMessage("the kitchen " * 300)])
    assert policy.model.training


# --- segments ---------------------------------------------------------------------------------------------------------


async def test_special_tokens_and_invalid_utf8_inside_a_reply_keep_one_segment(
    policy: LocalChatModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    recorders = await converse_all(policy, 24, turns=3)
    replies = [call.sampled_ids for recorder in recorders for call in recorder.calls]
    specials = set(tokenizer.convert_tokens_to_ids(["<|user|>", "<|system|>", "<|assistant|>", "<|pad|>"]))
    assert any(specials & set(reply) for reply in replies), "a case was sampled"
    assert any("\ufffd" in tokenizer.decode(reply) for reply in replies), "a case was sampled"
    assert {len(recorder.segments()) for recorder in recorders} == {1}


async def test_conversations_with_the_same_words_keep_their_own_tokens(
    policy: LocalChatModel, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
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


async def test_an_edited_conversation_is_a_segment_of_its_own(policy: LocalChatModel) -> None:
    with TokenRecorder(seed=0) as recorder:
        messages = opening(1)
        await policy.ainvoke(messages)
        await policy.ainvoke([*messages, AIMessage("something it never said"), HumanMessage("so?")])
    first, second = recorder.segments()
    assert max(forward_error(policy, first), forward_error(policy, second)) < 1e-4


# --- seeds, limits, stop strings --------------------------------------------------------------------------------------


async def test_a_seed_gives_the_same_tokens_alone_and_among_others(policy: LocalChatModel) -> None:
    async def sampled(seed: int, i: int) -> list[int]:
        return list((await converse(policy, i, turns=1, seed=seed)).calls[0].sampled_ids)

    alone = await sampled(7, 3)
    among = await asyncio.gather(*(sampled(100 + i, i) for i in range(20)), sampled(7, 3))
    assert among[-1] == alone
    assert await sampled(8, 3) != alone


async def test_a_reply_ends_where_it_should(policy: LocalChatModel, tokenizer: PreTrainedTokenizerFast) -> None:
    free = await policy.ainvoke(opening(0), seed=3)
    assert free.response_metadata["finish_reason"] == "length"
    assert free.usage_metadata is not None and free.usage_metadata["output_tokens"] == 12
    assert (await policy.ainvoke(opening(0), seed=3, max_new_tokens=5)).usage_metadata["output_tokens"] == 5
    stop = free.text[4:6]
    stopped = await policy.ainvoke(opening(0), seed=3, stop=[stop, "never said"])
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.response_metadata["finish_reason"] == "stop"
    replies = [await policy.ainvoke(opening(i), seed=i, max_new_tokens=400) for i in range(4)]
    ended = next(reply for reply in replies if reply.usage_metadata["output_tokens"] < 400)
    assert ended.response_metadata["finish_reason"] == "stop"
    assert "<|end|>" not in ended.text


async def test_a_conversation_goes_on_after_a_stop_string(policy: LocalChatModel) -> None:
    word = (await policy.ainvoke(opening(0), seed=3)).text[4:6]
    with TokenRecorder() as recorder:
        messages = opening(0)
        messages += [await policy.ainvoke(messages, seed=3, stop=[word]), HumanMessage("go on")]
        await policy.ainvoke(messages)
    (segment,) = recorder.segments()
    assert forward_error(policy, segment) < 1e-4


async def test_a_conversation_too_long_fails_alone(policy: LocalChatModel) -> None:
    long = [HumanMessage("the kitchen " * 300)]
    *answers, error = await asyncio.gather(
        *(policy.ainvoke(opening(i), seed=i) for i in range(4)), policy.ainvoke(long), return_exceptions=True
    )
    assert isinstance(error, ConfigurationError)
    assert "may grow by 12; the model takes 512" in str(error)
    for i, answer in enumerate(answers):
        assert answer.text == (await policy.ainvoke(opening(i), seed=i)).text


async def test_calls_that_nobody_waits_for_do_not_harm_the_others(policy: LocalChatModel) -> None:
    engine = policy._engine
    gone = Request([{"role": "user", "content": "the kitchen " * 300}])
    with transformers_engine._one_batch_at_a_time:  # the engine waits here until all four are in
        futures: list[Future[Generated]] = [engine.submit(Request([{"role": "user", "content": "hm"}], seed=0))]
        gone.future.cancel()
        futures += [engine.submit(request) for request in (gone, Request([{"role": "user", "content": "hm"}], seed=0))]
    assert futures[0].result(30).text == futures[2].result(30).text
    call = asyncio.create_task(policy.ainvoke(opening(1), max_new_tokens=200))
    await asyncio.sleep(0)
    call.cancel()
    assert (await policy.ainvoke(opening(1), seed=0)).text == (await policy.ainvoke(opening(1), seed=0)).text


def test_a_stream_whose_loop_is_gone_does_not_harm_the_others(policy: LocalChatModel) -> None:
    async def first_piece() -> None:
        stream = policy.astream(opening(1), max_new_tokens=200)
        await anext(stream)

    asyncio.run(first_piece())
    assert policy.invoke(opening(1), seed=0).text


# --- batches ----------------------------------------------------------------------------------------------------------


async def test_concurrent_calls_share_forward_passes(policy: LocalChatModel) -> None:
    with counted_forwards(policy.model) as separate:
        for i in range(8):
            await policy.ainvoke(opening(i), seed=i)
    with counted_forwards(policy.model) as shared:
        await asyncio.gather(*(policy.ainvoke(opening(i), seed=i) for i in range(32)))
    assert max(shared) == 32
    assert len(shared) <= 12
    assert len(separate) >= 6 * len(shared), "8 calls one by one take more than 32 at once"


async def test_a_batch_holds_at_most_max_batch_size(tokenizer: PreTrainedTokenizerFast) -> None:
    model = create_model(tokenizer, hidden_size=32, layers=1)
    policy = LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=2, max_batch_size=3)
    with counted_forwards(model) as sizes:
        await asyncio.gather(*(policy.ainvoke(opening(i)) for i in range(8)))
    assert max(sizes) == 3


async def test_a_full_cache_is_exact_and_splits_no_segment(
    policy: LocalChatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_engine, "CACHED_BYTES", 300_000)
    recorders = await converse_all(policy, 16, turns=4)
    held = [prefix.added for prefix in policy._engine._prefixes.values()]
    assert 0 < sum(held) == policy._engine._cached <= 300_000
    assert {len(recorder.segments()) for recorder in recorders} == {1}
    assert max(forward_error(policy, recorder.segments()[0]) for recorder in recorders) < 1e-4


async def test_a_conversation_goes_on_after_the_weights_have_changed(policy: LocalChatModel) -> None:
    with TokenRecorder(seed=4) as recorder:
        messages = opening(3)
        for _ in range(3):
            messages += [await policy.ainvoke(messages), HumanMessage("hm")]
            policy.weights_changed()
    assert len(recorder.segments()) == 1


def test_an_engine_goes_with_its_model(tokenizer: PreTrainedTokenizerFast) -> None:
    """Its thread, weights and cache: an evaluation makes a model each time."""
    before = threading.enumerate()
    policy = LocalChatModel(model=create_model(tokenizer, hidden_size=32, layers=1), tokenizer=tokenizer)
    policy.with_temperature(0).invoke(opening(1))
    engine = weakref.ref(policy._engine)
    (thread,) = set(threading.enumerate()) - set(before)
    del policy
    gc.collect()
    thread.join(10)
    assert engine() is None and not thread.is_alive()


async def test_two_models_take_turns_with_whole_batches(tokenizer: PreTrainedTokenizerFast) -> None:
    """Replies of different lengths do not drive episodes out of step: the slowest is waited for."""
    model = create_model(tokenizer, hidden_size=32, layers=1)
    policy = LocalChatModel(model=model, tokenizer=tokenizer)
    world = LocalChatModel(model=create_model(tokenizer, hidden_size=32, layers=1), tokenizer=tokenizer, max_new_tokens=4)

    async def episode(i: int) -> None:
        messages = opening(i)
        for turn in range(3):
            messages += [await policy.ainvoke(messages, max_new_tokens=1 + 3 * (i + turn) % 24)]
            messages += [HumanMessage((await world.ainvoke(messages)).text or "hm")]

    with counted_forwards(world.model) as sizes:
        await asyncio.gather(*(episode(i) for i in range(16)))
    assert len(sizes) <= 3 * 4


async def test_a_turn_forwards_only_what_is_new(policy: LocalChatModel) -> None:
    lengths: list[int] = []

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    hook = policy.model.register_forward_pre_hook(note, with_kwargs=True)
    messages = opening(12)
    messages += [await policy.ainvoke(messages), HumanMessage("hm")]
    await policy.ainvoke(messages)
    hook.remove()
    assert lengths[0] > 60
    assert all(length < 10 for length in lengths[1:])


# --- streams, messages, loading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_streams_say_what_invoke_says(policy: LocalChatModel, seed: int) -> None:
    plain = await policy.ainvoke(opening(2), seed=seed, max_new_tokens=40)
    for stop in (None, [plain.text[10:14], "\ufffd\ufffd\ufffd\ufffd"]):
        options: dict[str, Any] = {"seed": seed, "max_new_tokens": 40, "stop": stop}
        whole = await policy.ainvoke(opening(2), **options)
        for chunks in (
            list(policy.stream(opening(2), **options)),
            [chunk async for chunk in policy.astream(opening(2), **options)],
        ):
            assert "".join(chunk.text for chunk in chunks) == whole.text
            total = chunks[0]
            for chunk in chunks[1:]:
                total += chunk
            assert total.usage_metadata == whole.usage_metadata
            assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


async def test_streamed_calls_are_recorded_too(policy: LocalChatModel) -> None:
    with TokenRecorder() as recorder:
        messages = opening(2)
        reply = "".join([chunk.text async for chunk in policy.astream(messages, seed=1)])
        await policy.ainvoke([*messages, AIMessage(reply), HumanMessage("go on")], seed=2)
    (segment,) = recorder.segments()
    assert forward_error(policy, segment) < 1e-4


def test_usage_and_metadata(policy: LocalChatModel) -> None:
    with TokenRecorder() as recorder:
        reply = policy.invoke(opening(2))
    (call,) = recorder.calls
    assert call.run_id is not None and str(call.run_id) in str(reply.id)
    given, sampled = len(call.given_ids), len(call.sampled_ids)
    assert reply.usage_metadata == {"input_tokens": given, "output_tokens": sampled, "total_tokens": given + sampled}
    assert reply.response_metadata["model_name"] == "tiny"
    assert policy.busy_seconds > 0


def test_a_model_saved_and_loaded_answers_alike(policy: LocalChatModel, tmp_path: Path) -> None:
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    loaded = LocalChatModel.from_path(tmp_path, max_new_tokens=12)
    assert loaded.invoke(opening(2), seed=1).text == policy.invoke(opening(2), seed=1).text


def no_folder(path: Path, policy: LocalChatModel) -> None:
    path.rmdir()


def no_model(path: Path, policy: LocalChatModel) -> None:
    pass


def no_weights(path: Path, policy: LocalChatModel) -> None:
    policy.model.config.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)


def broken_config(path: Path, policy: LocalChatModel) -> None:
    no_weights(path, policy)
    (path / "config.json").write_text("{")


def no_chat_template(path: Path, policy: LocalChatModel) -> None:
    policy.model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").unlink()


@pytest.mark.parametrize("spoil", [no_folder, no_model, no_weights, broken_config, no_chat_template])
def test_what_is_no_model_is_refused(
    policy: LocalChatModel, tmp_path: Path, spoil: Callable[[Path, LocalChatModel], None]
) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    spoil(folder, policy)
    with pytest.raises(ConfigurationError, match="policy|chat template"):
        LocalChatModel.from_path(folder)


def test_messages_of_unknown_roles_are_refused(policy: LocalChatModel) -> None:
    with pytest.raises(ConfigurationError, match="ChatMessage cannot be rendered"):
        policy.invoke([ChatMessage(content="hm", role="narrator")])


class TestConformance(ChatModelUnitTests):
    """LangChain's own suite. Tools are not supported."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return LocalChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        tokenizer = create_tokenizer(TEXTS, vocab_size=320)
        return {"model": create_model(tokenizer, hidden_size=32, layers=1), "tokenizer": tokenizer}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False
