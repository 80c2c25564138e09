"""What every engine keeps to, in this process, in one of its own or on a server: segments are those of the one in process."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool
from tiny_models import create_model
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.errors import ContextExceeded
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.requests import Engine, Request
from dreamgym_lg.integrations.vllm import ServedEngine
from dreamgym_lg.token_recorder import TokenRecorder

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
from vllm_server import VLLMServer  # noqa: E402


@tool
def look(place: str, times: int = 1) -> str:
    """Look at a place."""
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    create_model(tokenizer, hidden_size=64, layers=2, max_tokens=512).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def here(folder: Path) -> LocalChatModel:
    return LocalChatModel.from_path(folder, max_new_tokens=12)


@pytest.fixture(scope="module", params=["in process", "served"])
def policy(request: pytest.FixtureRequest, folder: Path, here: LocalChatModel) -> Iterator[LocalChatModel]:
    if request.param == "served":
        server = VLLMServer(here.model, here.tokenizer).start()
        yield here.model_copy(update={"engine": ServedEngine(server.url, here.tokenizer, model=here.model)})
        server.stop()
    else:
        yield LocalChatModel.from_path(folder, max_new_tokens=12)


@pytest.fixture
def both(policy: LocalChatModel, here: LocalChatModel) -> list[LocalChatModel]:
    """The engine in process and the other."""
    return [here, policy]


async def test_it_is_an_engine(policy: LocalChatModel) -> None:
    assert isinstance(policy.engine, Engine)
    said = await asyncio.wrap_future(
        policy.engine.submit(Request([{"role": "user", "content": "hm"}], max_new_tokens=5, seed=1))
    )
    assert len(said.sampled_ids) == len(said.logprobs) == 5 and said.finish_reason == "length"
    assert policy.engine.ends == {policy.tokenizer.eos_token_id}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_segments_are_those_of_the_engine_in_process(
    policy: LocalChatModel,
    here: LocalChatModel,
    temperature: float,
    converse_all: Callable[..., Any],
    forward_error: Callable[..., float],
) -> None:
    ours, theirs = [await converse_all(each.with_temperature(temperature), 12, turns=3) for each in (here, policy)]
    for mine, other in zip(ours, theirs, strict=True):
        (segment,), (same,) = mine.segments(), other.segments()
        assert (segment.token_ids, segment.sampled) == (same.token_ids, same.sampled)
        assert segment.logprobs == pytest.approx(same.logprobs, abs=1e-4)
        assert same.temperature == temperature
        assert forward_error(here.with_temperature(temperature), same) < 1e-4


async def test_replies_end_alike(both: list[LocalChatModel], opening: Callable[[int], list[BaseMessage]]) -> None:
    stop = [(await both[0].ainvoke(opening(0), seed=3)).text[4:6], "never said"]
    for seed in (1, 3):
        for options in ({"stop": stop}, {"max_new_tokens": 60}, {}):
            mine, other = [await each.ainvoke(opening(0), seed=seed, **options) for each in both]
            assert mine.text == other.text and mine.usage_metadata == other.usage_metadata
            assert mine.response_metadata["finish_reason"] == other.response_metadata["finish_reason"]


async def test_a_conversation_goes_on_from_what_was_sampled(
    both: list[LocalChatModel], opening: Callable[[int], list[BaseMessage]], forward_error: Callable[..., float]
) -> None:
    here, policy = both
    word = (await here.ainvoke(opening(0), seed=3)).text[4:6]
    with TokenRecorder() as recorder:
        messages = opening(0)
        messages += [await policy.ainvoke(messages, seed=3, stop=[word]), HumanMessage("go on")]
        await policy.ainvoke(messages, seed=4)
    (segment,) = recorder.segments()
    assert forward_error(here, segment) < 1e-4


async def test_calls_of_tools_are_read_and_forced_alike(both: list[LocalChatModel]) -> None:
    for choice in ("look", "auto"):
        bound = [each.bind_tools([look], tool_choice=choice) for each in both]
        with TokenRecorder() as recorder:
            mine, other = [await each.ainvoke("Where is the apple?", seed=5) for each in bound]
        assert mine.content == other.content and mine.tool_calls == other.tool_calls
        first, second = recorder.calls
        assert first.prompt_ids == second.prompt_ids and first.sampled_ids == second.sampled_ids


async def test_a_stream_gives_the_whole_reply(both: list[LocalChatModel], opening: Callable[[int], list[BaseMessage]]) -> None:
    policy = both[1]
    whole = await policy.ainvoke(opening(1), seed=5)
    assert "".join([chunk.text async for chunk in policy.astream(opening(1), seed=5)]) == whole.text


async def test_a_conversation_too_long_fails_alone(
    both: list[LocalChatModel], opening: Callable[[int], list[BaseMessage]]
) -> None:
    policy = both[1]
    *answers, error = await asyncio.gather(
        *(policy.ainvoke(opening(i), seed=i) for i in range(4)), policy.ainvoke("the kitchen " * 300), return_exceptions=True
    )
    assert isinstance(error, ContextExceeded) and "may grow by 12; the model takes 512" in str(error)
    assert [answer.text for answer in answers] == [(await policy.ainvoke(opening(i), seed=i)).text for i in range(4)]
