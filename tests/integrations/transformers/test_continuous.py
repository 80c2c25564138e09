"""Continuous batching, on a CPU: what holds beyond the contract of all engines (`test_contract.py`)."""

import asyncio
import copy
import gc
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from langchain_core.messages import BaseMessage, HumanMessage
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.errors import ConfigurationError, ContextExceeded
from dreamgym_lg.event_loop import lasting_loop
from dreamgym_lg.integrations.transformers import continuous
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.continuous import ContinuousEngine, bfloat16_copy
from dreamgym_lg.integrations.transformers.engine import LocalEngine
from dreamgym_lg.integrations.transformers.tiny_models import create_model


def create_policy(tokenizer: PreTrainedTokenizerFast, *, cached_tokens: int = 16_384) -> LocalChatModel:
    model = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=512)
    engine = ContinuousEngine(model, tokenizer, cached_tokens=cached_tokens)
    return LocalChatModel(model=model, tokenizer=tokenizer, engine=engine, max_new_tokens=12)


async def test_new_weights_answer_after_clear(
    tokenizer: PreTrainedTokenizerFast,
    converse: Callable[..., Any],
    converse_all: Callable[..., Any],
    forward_error: Callable[..., float],
) -> None:
    policy = create_policy(tokenizer)
    policy.model.train()
    own = copy.deepcopy(policy.model)

    async def said(engine: Any) -> tuple[Sequence[int], Sequence[float]]:
        greedy = policy.model_copy(update={"engine": engine, "temperature": 0.0})
        (call,) = (await converse(greedy, 20, turns=1)).calls
        return call.sampled_ids, call.logprobs

    old = await said(policy.engine)
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(3)
        own.load_state_dict(policy.model.state_dict())
    policy.weights_changed()
    assert policy.model.training, "as it was before the batch"
    new, here = await said(policy.engine), await said(LocalEngine(own, tokenizer))
    assert new[0] == here[0] and new[1] == pytest.approx(here[1], abs=1e-4) != old[1]
    recorders = await converse_all(policy, 4, turns=2)
    assert max(forward_error(policy, recorder.segments()[0]) for recorder in recorders) < 1e-4
    policy.free_memory()


async def test_a_full_cache_is_exact_and_splits_no_segment(
    tokenizer: PreTrainedTokenizerFast, converse_all: Callable[..., Any], forward_error: Callable[..., float]
) -> None:
    policy = create_policy(tokenizer, cached_tokens=1024)  # four pages: four of the twelve conversations
    recorders = await converse_all(policy, 12, turns=3)
    assert {len(recorder.segments()) for recorder in recorders} == {1}
    assert max(forward_error(policy, recorder.segments()[0]) for recorder in recorders) < 1e-4
    policy.free_memory()


async def test_a_conversation_that_fits_into_no_memory_fails_alone(
    tokenizer: PreTrainedTokenizerFast, opening: Callable[[int], list[BaseMessage]]
) -> None:
    policy = create_policy(tokenizer, cached_tokens=256)
    long = policy.ainvoke("the kitchen holds a red apple " * 40)
    answer, error = await asyncio.gather(policy.ainvoke(opening(0)), long, return_exceptions=True)
    assert isinstance(error, ContextExceeded) and "there is memory for the keys and values of 256" in str(error)
    assert answer.usage_metadata
    policy.free_memory()


async def test_a_turn_forwards_only_what_is_beyond_the_full_pages(tokenizer: PreTrainedTokenizerFast) -> None:
    policy = create_policy(tokenizer)
    lengths: list[int] = []
    policy.model.register_forward_pre_hook(lambda _, __, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True)
    messages: list[BaseMessage] = [HumanMessage("the kitchen holds a red apple " * 40)]
    messages += [await policy.ainvoke(messages), HumanMessage("hm")]
    assert max(lengths) > continuous.PAGE
    lengths.clear()
    await policy.ainvoke(messages)
    assert max(lengths) < continuous.PAGE
    policy.free_memory()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_whose_weights_are_broken_says_so(tokenizer: PreTrainedTokenizerFast, opening: Any, temperature: float) -> None:
    policy = create_policy(tokenizer).with_temperature(temperature)
    weight = policy.model.lm_head.weight
    whole = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        policy.invoke(opening(0))
    with torch.no_grad():
        weight.copy_(whole)
    policy.weights_changed()
    assert policy.invoke(opening(0)).usage_metadata
    policy.free_memory()


async def test_calls_at_temperature_0_and_others_take_turns(
    tokenizer: PreTrainedTokenizerFast, opening: Callable[[int], list[BaseMessage]]
) -> None:
    """Two threads that compute with one model change what it is: `is_causal` would stay False, and training read the future."""
    policy = create_policy(tokenizer)
    asked = [policy.with_temperature(float(i % 2)).ainvoke(opening(i), max_new_tokens=100) for i in range(4)]
    assert all(reply.usage_metadata for reply in await asyncio.gather(*asked))
    await asyncio.to_thread(policy.free_memory)
    assert getattr(policy.model.config, "is_causal", True)


async def test_a_call_that_nobody_waits_for_leaves_the_batch(
    tokenizer: PreTrainedTokenizerFast, opening: Callable[[int], list[BaseMessage]]
) -> None:
    policy = create_policy(tokenizer)
    call = asyncio.create_task(policy.ainvoke(opening(1), max_new_tokens=400))
    await policy.ainvoke(opening(0), max_new_tokens=1)
    call.cancel()
    assert (await policy.ainvoke(opening(1))).usage_metadata
    await asyncio.to_thread(policy.free_memory)  # waits for the calls under way


def test_an_engine_goes_with_its_model(tokenizer: PreTrainedTokenizerFast, opening: Callable[[int], list[BaseMessage]]) -> None:
    policy = create_policy(tokenizer)
    before = set(threading.enumerate())
    policy.invoke(opening(1))
    engine, model = weakref.ref(policy.engine), weakref.ref(policy.model)
    thread = next(each for each in set(threading.enumerate()) - before if "generation_loop" in each.name)
    del policy
    gc.collect()
    thread.join(10)
    loop = lasting_loop("dreamgym-continuous")
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)  # what stops the thread has ended too
    gc.collect()
    assert engine() is None and not thread.is_alive() and model() is None


def test_a_bfloat16_copy_is_the_same_model(tokenizer: PreTrainedTokenizerFast) -> None:
    model = create_model(tokenizer, hidden_size=32, layers=1)
    model.lm_head.weight = model.get_input_embeddings().weight
    copied = bfloat16_copy(model)
    assert {each.dtype for each in copied.parameters()} == {torch.bfloat16} and model.dtype == torch.float32
    assert copied.lm_head.weight is copied.get_input_embeddings().weight
    ids = torch.arange(20)[None]
    assert torch.allclose(copied(ids).logits.float(), model(ids).logits, atol=0.05)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert copied.lm_head.weight.any()


def test_a_size_below_one_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model = create_model(tokenizer, hidden_size=32, layers=1)
    with pytest.raises(ConfigurationError, match="cached_tokens=0: at least 1"):
        ContinuousEngine(model, tokenizer, cached_tokens=0)
