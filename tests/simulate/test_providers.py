"""Every provider's chat model in an episode: what it binds reaches the policy in one form, and users get what they expect."""

import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessageChunk
from langchain_core.tools import tool
from pydantic import BaseModel
from worlds import TASK, Answers
from zoo.policy import ScriptedPolicy

from dreamgym_lg.simulate import simulated
from dreamgym_lg.simulate.models import normalise


class Answer(BaseModel):
    """An answer."""

    text: str
    n: int


@tool
def weather(city: str, days: int = 1) -> str:
    """Weather of a city."""
    raise AssertionError("the real tool ran")


@tool
def news(topic: str) -> str:
    """News on a topic."""
    raise AssertionError("the real tool ran")


AWS = {
    "region_name": "us-east-1",
    "aws_access_key_id": "x",
    "aws_secret_access_key": "x",
    "model": "anthropic.claude-sonnet-4-5-v1:0",
}
PROVIDERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "openai": ("langchain_openai", "ChatOpenAI", {"model": "gpt-5", "api_key": "x"}),
    "openai-responses": ("langchain_openai", "ChatOpenAI", {"model": "gpt-5", "api_key": "x", "use_responses_api": True}),
    "anthropic": ("langchain_anthropic", "ChatAnthropic", {"model": "claude-sonnet-4-5", "api_key": "x"}),
    "google": ("langchain_google_genai", "ChatGoogleGenerativeAI", {"model": "gemini-2.5-flash", "api_key": "x"}),
    "bedrock-converse": ("langchain_aws", "ChatBedrockConverse", AWS),
    "bedrock": ("langchain_aws", "ChatBedrock", AWS),
    "ollama": ("langchain_ollama", "ChatOllama", {"model": "llama3"}),
    "mistral": ("langchain_mistralai", "ChatMistralAI", {"model": "m", "api_key": "x"}),
    "groq": ("langchain_groq", "ChatGroq", {"model": "m", "api_key": "x"}),
}
IGNORES_CHOICE = ("ollama",)
"""Its class drops `tool_choice`, so that production's model is free as well."""


class TextPolicy(ScriptedPolicy):
    """As a model without a provider answers: text and tool calls, and no fields of anyone's API."""

    def _answer(self, *args: Any) -> AIMessage:
        message = super()._answer(*args)
        return AIMessage(message.content, tool_calls=message.tool_calls)


@cache
def model_of(provider: str) -> BaseChatModel:
    module, name, arguments = PROVIDERS[provider]
    pytest.importorskip(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(import_module(module), name)(**arguments)


async def _ainvoke(runnable: Any, given: Any) -> Any:
    return await runnable.ainvoke(given)


async def _stream(runnable: Any, given: Any) -> Any:
    return whole(list(runnable.stream(given)))


async def _astream(runnable: Any, given: Any) -> Any:
    return whole([part async for part in runnable.astream(given)])


async def _invoke(runnable: Any, given: Any) -> Any:
    return runnable.invoke(given)


async def _batch(runnable: Any, given: Any) -> Any:
    return runnable.batch([given, given])[1]


async def _abatch(runnable: Any, given: Any) -> Any:
    return (await runnable.abatch([given, given]))[1]


def whole(parts: list[Any]) -> Any:
    """Chunks of a message as one; of what a parser yields, the last."""
    return sum(parts[1:], parts[0]) if isinstance(parts[0], BaseMessageChunk) else parts[-1]


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": _invoke,
    "ainvoke": _ainvoke,
    "stream": _stream,
    "astream": _astream,
    "batch": _batch,
    "abatch": _abatch,
}
PROVIDER = pytest.mark.parametrize("provider", PROVIDERS)
WAY = pytest.mark.parametrize("way", WAYS)


@PROVIDER
@WAY
async def test_tools_reach_the_policy_in_openais_form(provider: str, way: str) -> None:
    model, policy, environment = model_of(provider), TextPolicy(), Answers()
    wanted = {"auto": None, "any": "required", "news": "news"}
    async with simulated(None, policy=policy, environment=environment) as episode:
        for choice, normal in wanted.items():
            reply = await WAYS[way](model.bind_tools([weather, news], tool_choice=choice), "go")
            given = policy.asked[-1][1]
            assert [made["function"]["name"] for made in given["tools"]] == ["weather", "news"]
            schema = given["tools"][0]["function"]["parameters"]
            assert schema["properties"]["city"]["type"] == "string" and schema["required"] == ["city"]
            assert given["tools"][0]["function"]["description"] == "Weather of a city."
            assert set(given) <= {"tools", "tool_choice", "stop"}, "a provider's own settings mean nothing to the policy"
            (call,) = reply.tool_calls
            if provider in IGNORES_CHOICE:
                assert given.get("tool_choice") is None
            else:
                assert normalise(given).get("tool_choice") == normal, "in the form of the policy's own class"
                assert call["name"] == ("news" if choice == "news" else "weather")
            assert call["args"] and isinstance(reply, AIMessage)
    assert environment.shown == ["weather", "news"]
    assert {call.model for call in episode.calls} == {model._get_ls_params()["ls_model_name"]}
    assert all(call.streamed is ("stream" in way) for call in episode.calls)


@PROVIDER
@WAY
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
async def test_structured_output_is_the_users_object(provider: str, way: str, method: str) -> None:
    model, policy = model_of(provider), TextPolicy()
    async with simulated(None, policy=policy, environment=Answers()):
        as_object = await WAYS[way](model.with_structured_output(Answer, method=method), "go")
        kept = await WAYS[way](model.with_structured_output(Answer.model_json_schema(), method=method), "go")
        raw = await WAYS["invoke"](model.with_structured_output(Answer, method=method, include_raw=True), "go")
    assert as_object == Answer(text="policy-text", n=1)
    assert kept == {"text": "policy-text", "n": 1}
    assert raw["parsed"] == as_object and isinstance(raw["raw"], AIMessage) and raw["parsing_error"] is None
    for _, given in policy.asked:
        if method == "function_calling" or provider == "bedrock":  # ChatBedrock takes the one for the other
            assert normalise(given)["tool_choice"] in ("Answer", "required") and len(given["tools"]) == 1
        else:
            assert given["response_format"]["json_schema"]["schema"]["required"] == ["text", "n"]


@PROVIDER
@pytest.mark.parametrize("strategy", [None, ToolStrategy(Answer), ProviderStrategy(Answer)], ids=["plain", "tool", "provider"])
async def test_create_agent_runs_with_the_providers_model(provider: str, strategy: Any) -> None:
    agent = create_agent(model_of(provider), [weather, news], response_format=strategy, system_prompt="Be brief.")
    sequence = ("weather", "Answer") if isinstance(strategy, ToolStrategy) else ()
    policy, environment = TextPolicy(per_reply=2 if strategy is None else 1, sequence=sequence), Answers()
    async with simulated(agent, policy=policy, environment=environment, task=TASK) as episode:
        state = await episode.ainvoke({"messages": [("user", "go")]})
    assert len(episode.steps) == (2 if strategy is None else 1) and policy.calls == 2
    if strategy is None:
        assert state["messages"][-1].text.startswith("policy: ")
    else:
        assert state["structured_response"] == Answer(text="policy-text", n=1)


@PROVIDER
def test_events_v3_reach_the_policy(provider: str) -> None:
    policy = TextPolicy()
    with simulated(None, policy=policy, environment=Answers()) as episode:
        stream = model_of(provider).bind_tools([weather]).stream_events("go", version="v3")
        assert [call["name"] for call in stream.output.tool_calls] == ["weather"]
        assert "".join(model_of(provider).stream_events("go", version="v3").text).startswith("policy: go")
    assert policy.calls == 2 and len(episode.calls) == 2


@PROVIDER
async def test_async_events_v3_reach_the_policy(provider: str) -> None:
    policy = TextPolicy()
    async with simulated(None, policy=policy, environment=Answers()) as episode:
        stream = await model_of(provider).bind_tools([weather]).astream_events("go", version="v3")
        assert [call["name"] for call in (await stream.output).tool_calls] == ["weather"]
    assert policy.calls == len(episode.calls) == 1
