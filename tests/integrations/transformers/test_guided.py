"""Guided decoding: a model of random weights calls tools as their schemas say, and what was guided is known to have been."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

pytest.importorskip("llguidance", reason="needs: pip install 'dreamgym-lg[guided]'")

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.guide import Guide, Guides, Tag
from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Segment, Task, Trajectory

Make = Callable[[str], LocalChatModel]


@tool
def look(place: Literal["box", "table"], often: bool) -> str:
    """Look at a place."""
    return "nothing"


@tool
def wait() -> str:
    """Do nothing."""
    return "time passes"


def call(policy: LocalChatModel, choice: Any, seed: int = 0) -> tuple[AIMessage, Segment]:
    with TokenRecorder(seed=seed) as recorder:
        reply = policy.bind_tools([look, wait], tool_choice=choice).invoke("Look!")
    (segment,) = recorder.segments()
    return reply, segment


@pytest.mark.parametrize("family", ["from scratch", "without tools", "qwen2.5", "qwen3-2507", "llama3.2", "mistral", "gemma3"])
@pytest.mark.parametrize("choice", ["any", "look"])
def test_random_weights_make_calls_that_fit_their_schemas(family: str, choice: str, of_template: Make) -> None:
    policy = of_template(family)
    policy.max_new_tokens = 120
    guided = policy.model_copy(update={"guided": True})
    named = set()
    for seed in range(3):
        reply, segment = call(guided, choice, seed)
        cut = reply.response_metadata["finish_reason"] == "length"
        assert reply.tool_calls and len(reply.invalid_tool_calls) <= cut and segment.guided
        for each in reply.tool_calls:
            named.add(each["name"])
            fits = each["args"].get("place") in ("box", "table") and isinstance(each["args"].get("often"), bool)
            assert fits if each["name"] == "look" else each["name"] == "wait"
        assert max(segment.logprobs) <= 0 and segment.logprobs.count(0.0) > segment.sampled.count(0), "of what was left"
    assert named == {"look"} if choice == "look" else named <= {"look", "wait"}
    free, segment = call(policy, choice)
    assert not free.tool_calls and not segment.guided


def test_text_is_free_until_a_call_begins(of_template: Make) -> None:
    policy = of_template("qwen2.5")
    size = policy.model.config.vocab_size  # type: ignore[union-attr]
    guides = Guides(policy.tokenizer, size, [policy.tokenizer.eos_token_id])
    guide = Guide("<tool_call>", [Tag('<tool_call>\n{"name": "look", "arguments": ', {"type": "object"}, "}\n</tool_call>")])

    def allowed(text: str) -> int:
        return sum(map(bool, guides.matcher(guide, text).compute_logit_bias()))

    free = allowed("I look <tool_ca")
    assert free > size // 2 and allowed("I look <tool_call>") < 5
    called = 'I look <tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert 0 < allowed(called) < 10 and allowed(f"{called}\n<tool_call>") < 5, "another call or the end"
    with pytest.raises(ConfigurationError, match="is no call of these tools"):
        allowed(f"{called} and")
    with pytest.raises(ConfigurationError, match="begins with .* is no call of these tools"):
        allowed('<tool_call>\n{"name": "jump')


async def test_a_guided_reply_changes_no_other_of_its_batch(of_template: Make) -> None:
    policy = of_template("qwen2.5")
    policy.max_new_tokens = 40
    free = policy.bind_tools([look, wait], seed=1)
    guided = policy.model_copy(update={"guided": True}).bind_tools([look], tool_choice="look", seed=1)
    alone = [await free.ainvoke("Look!"), await guided.ainvoke("Look!")]
    together = await asyncio.gather(free.ainvoke("Look!"), guided.ainvoke("Look!"))
    assert [reply.content for reply in alone] == [reply.content for reply in together] and together[0].content
    assert alone[1].tool_calls == together[1].tool_calls != []


def test_what_was_guided_is_recorded_apart_and_stored(of_template: Make) -> None:
    policy = of_template("qwen2.5")
    policy.max_new_tokens = 60
    with TokenRecorder(seed=0) as recorder:
        for guided in (False, True):
            policy.model_copy(update={"guided": guided}).bind_tools([look], tool_choice="look").invoke("Look!")
    segments = recorder.segments()
    assert [segment.guided for segment in segments] == [False, True]
    task = Task(id="t", instruction="i", environment="e")
    with ReplayBuffer(":memory:") as buffer:
        buffer.add(Trajectory(task=task, source="synthetic", run="r", segments=segments))
        (stored,) = buffer.trajectories(run="r", segments=True)
    assert [segment.guided for segment in stored.segments] == [False, True]


def test_an_engine_that_does_not_guide_says_so(of_template: Make) -> None:
    class Plain:
        ends = frozenset({0})

        def submit(self, request: Request) -> "Future[Generated]":
            future: Future[Generated] = Future()
            future.set_result(Generated("", [1], [0], [0.0], "stop"))
            return future

        def clear(self) -> None: ...

    policy = of_template("qwen2.5").model_copy(update={"engine": Plain(), "guided": True})
    assert policy.invoke("hello").text == "", "no tools, nothing to guide"
    with pytest.raises(ConfigurationError, match="Plain guides no tool calls"):
        policy.bind_tools([look]).invoke("Look!")
