"""A small agent of LangChain's own, really run: what it leaves behind is what `load_traces` must read."""

import json
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.traces import load_traces
from dreamgym_lg.types import Step, Trajectory


class Scripted(BaseChatModel):
    """Replies in order, counted by the AI messages it is shown."""

    replies: list[AIMessage]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, *_: Any, **__: Any) -> "Scripted":
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        turn = sum(message.type == "ai" for message in messages)
        return ChatResult(generations=[ChatGeneration(message=self.replies[turn].model_copy(update={"id": None}))])


@tool
def search(query: str) -> str:
    """Find pages."""
    return f"3 hits for {query}"


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


def call(name: str, id: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args, "id": id, "type": "tool_call"}


REPLIES = [
    AIMessage("", tool_calls=[call("search", "c1", query="cafés"), call("weather", "c2", city="Paris")]),
    AIMessage("", tool_calls=[call("weather", "c3", city="Rome")]),
    AIMessage("Go to Rome."),
    AIMessage("You are welcome."),
]
STEPS = [
    ("Where to?", '{"arguments": {"query": "cafés"}, "name": "search"}', "3 hits for cafés"),
    ("3 hits for cafés", '{"arguments": {"city": "Paris"}, "name": "weather"}', "sunny in Paris"),
    ("sunny in Paris", '{"arguments": {"city": "Rome"}, "name": "weather"}', "sunny in Rome"),
    ("sunny in Rome", '{"answer": "Go to Rome."}', ""),
]
"""(observation, action, next observation) of the agent asked "Where to?"."""


def seen(steps: Trajectory | Any) -> list[tuple[str, str, str]]:
    found: list[Step] = list(steps.steps)
    return [(step.observation, step.action, step.next_observation) for step in found]


@pytest.fixture
def make_agent() -> Callable[..., Any]:
    agents = pytest.importorskip("langchain.agents")

    def make(replies: list[AIMessage] = REPLIES, tools: Any = (search, weather), **options: Any) -> Any:
        return agents.create_agent(Scripted(replies=replies), list(tools), system_prompt="You help.", **options)

    return make


@pytest.fixture
def played(make_agent: Callable[..., Any]) -> list[BaseMessage]:
    """The messages of one run, without the system message, as a graph's state has them."""
    messages: list[BaseMessage] = make_agent().invoke({"messages": [("user", "Where to?")]})["messages"]
    return messages


@pytest.fixture(name="steps")
def _steps() -> list[tuple[str, str, str]]:
    return STEPS


@pytest.fixture(name="seen")
def _seen() -> Callable[..., list[tuple[str, str, str]]]:
    return seen


@pytest.fixture
def make_deep_agent() -> Callable[..., Any]:
    deepagents = pytest.importorskip("deepagents")

    def make(**options: Any) -> Any:
        return deepagents.create_deep_agent(Scripted(replies=REPLIES), [search, weather], **options)

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A new file of one JSON value a line; texts and bytes are written as they are."""
    written = count()

    def write(*rows: Any) -> Path:
        path = tmp_path / f"traces{next(written)}.jsonl"
        lines = [row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows]
        path.write_bytes(b"\n".join(lines))
        return path

    return write


@pytest.fixture
def mutilate() -> Callable[[Any], Any]:
    """A JSON value with wrong values in some places and some keys gone."""
    rng = Random(0)
    wrong = [None, 5, "text", [], {}, [[]], {"role": 3}, True, float("nan"), {"type": "text"}, -1, [{"type": []}], 10**400]

    def mutilated(value: Any, rate: float) -> Any:
        if rng.random() < rate:
            return rng.choice(wrong)
        if isinstance(value, dict):
            return {key: mutilated(each, rate) for key, each in value.items() if rng.random() > rate}
        return [mutilated(each, rate) for each in value] if isinstance(value, list) else value

    return lambda value: mutilated(value, rng.choice((0.0005, 0.002, 0.02)))


@pytest.fixture
def survives(mutilate: Callable[[Any], Any], write: Callable[..., Path]) -> Callable[..., None]:
    """Any value anywhere in these sources' rows: each row is read or rejected, and what was read can be stored."""

    def survives(format: str, sources: list[list[Any]], times: int) -> None:
        accepted = rejected = 0
        with ReplayBuffer(":memory:") as buffer, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(times):
                rows = json.loads(json.dumps(sources[number % len(sources)]))
                try:
                    traces = load_traces(write(*map(mutilate, rows)), format=format)
                except ConfigurationError:
                    rejected += 1
                    continue
                buffer.extend(found := list(traces))
                accepted, rejected = accepted + len(found), rejected + len(traces.rejected)
        assert accepted > times / 20 and rejected > times / 20, (accepted, rejected)

    return survives
