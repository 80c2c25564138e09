"""What is asked of a reply: a tool, no tool, JSON, an early end. What is forced is given, never trained on."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatResult
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.requests import Request
from dreamgym_lg.token_recorder import TokenRecorder

Make = Callable[[str], LocalChatModel]
Steer = Callable[[Callable[[Request], Any]], None]
FORMS = {
    "from scratch": ('<tool_call>\n{"name": "', '", "arguments":', ' {"place": "box"}}\n</tool_call>'),
    "without tools": ('<tool_call>\n{"name": "', '", "arguments":', ' {"place": "box"}}\n</tool_call>'),
    "qwen3": ('<tool_call>\n{"name": "', '", "arguments":', ' {"place": "box"}}\n</tool_call>'),
    "llama3.1": ('{"name": "', '", "parameters":', ' {"place": "box"}}'),
    "mistral": ('[TOOL_CALLS] [{"name": "', '", "arguments":', ' {"place": "box"}}]'),
}


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"There is nothing in the {place}."


@tool
def wait() -> str:
    """Do nothing."""
    return "Time passes."


class Answer(BaseModel):
    """What was found."""

    item: str
    number: int = 1


LOOK: Any = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize(
    ("choice", "tools", "named"),
    [
        ("look", [look, wait], True),
        (LOOK, [look, wait], True),
        ("any", [look], True),
        ("any", [look, wait], False),
        ("required", [look, wait], False),
        (True, [look, wait], False),
    ],
)
def test_a_forced_call_is_given_and_not_sampled(
    family: str, choice: Any, tools: list[Any], named: bool, of_template: Make, steer: Steer
) -> None:
    before, middle, rest = FORMS[family]
    whole = f"{before}look{middle}{rest}"
    policy = of_template(family)
    steer(lambda _: whole)
    with TokenRecorder() as recorder:
        reply = policy.bind_tools(tools, tool_choice=choice).invoke("Hello")
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [("look", {"place": "box"})]
    assert reply.text == ""
    (call,) = recorder.calls
    forced = f"{before}look{middle}" if named else before
    assert policy.tokenizer.decode(call.prompt_ids).endswith(forced)
    assert policy.tokenizer.decode(call.sampled_ids[:-1]) == whole[len(forced) :]
    (segment,) = recorder.segments()
    assert segment.trainable == len(call.sampled_ids)


@pytest.mark.parametrize("choice", [None, "auto", False, "none"])
def test_an_unforced_reply_begins_as_it_likes(choice: Any, of_template: Make, steer: Steer) -> None:
    policy = of_template("from scratch")
    said = 'Hm. <tool_call>{"name": "look", "arguments": {"place": "box"}}</tool_call>'
    steer(lambda _: said)
    with TokenRecorder() as recorder:
        reply = policy.bind_tools([look], tool_choice=choice).invoke("Hello")
    given = policy.tokenizer.decode(recorder.calls[0].prompt_ids)
    assert given.endswith("<|assistant|>") and "look(place)" in given, "the tools are read of in any case"
    assert (reply.text, len(reply.tool_calls)) == ((said, 0) if choice == "none" else ("Hm. ", 1))


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([look], "lok", "unknown tool 'lok'; known: look. Did you mean 'look'"),
        ([], "any", "no tools are given"),
        ([{"type": "web_search_preview"}], None, "a tool of type 'web_search_preview' runs at its provider"),
    ],
)
def test_what_cannot_be_had_is_refused(tools: list[Any], choice: Any, message: str, of_template: Make) -> None:
    with pytest.raises(ConfigurationError, match=message):
        of_template("from scratch").bind_tools(tools, tool_choice=choice).invoke("Hello")


def test_unbound_arguments_in_openai_format(of_template: Make, steer: Steer) -> None:
    policy = of_template("from scratch")
    before, middle, rest = FORMS["from scratch"]
    steer(lambda _: f"{before}look{middle}{rest}")
    result: ChatResult = policy._generate([HumanMessage("Hello")], tools=[convert_to_openai_tool(look)], tool_choice=LOOK)
    message = result.generations[0].message
    assert isinstance(message, AIMessage) and message.tool_calls[0]["name"] == "look"


@pytest.mark.parametrize("family", FORMS)
async def test_streams_end_with_the_calls(family: str, of_template: Make, steer: Steer) -> None:
    before, middle, rest = FORMS[family]
    said = f"{before}look{middle}{rest}" if family == "llama3.1" else f"Hm <b>.{before}look{middle}{rest}"
    policy = of_template(family)
    steer(lambda _: said)
    model = policy.bind_tools([look])
    whole = await model.ainvoke("Hello", seed=3)
    assert whole.tool_calls and whole.text == ("" if family == "llama3.1" else "Hm <b>.")
    for chunks in (
        list(model.stream("Hello", seed=3)),
        [chunk async for chunk in model.astream("Hello", seed=3)],
    ):
        total: Any = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        assert isinstance(total, AIMessageChunk)
        assert total.text == whole.text
        assert total.tool_calls == whole.tool_calls
        assert [bool(chunk.tool_call_chunks) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_broken_calls_reach_the_message(of_template: Make, steer: Steer) -> None:
    policy = of_template("from scratch")
    steer(lambda _: '<tool_call>{"name": "look", "arguments": {"place": "b')
    reply = policy.bind_tools([look]).invoke("Hello")
    (bad,) = reply.invalid_tool_calls
    assert not reply.tool_calls and bad["name"] == "look" and "not JSON: Unterminated string" in str(bad["error"])
    chunks = list(policy.bind_tools([look]).stream("Hello"))
    assert [call["args"] for chunk in chunks for call in chunk.invalid_tool_calls] == [bad["args"]]
    assert not any(chunk.tool_calls for chunk in chunks)


def test_a_stop_string_is_sought_in_what_is_sampled(of_template: Make, steer: Steer) -> None:
    policy = of_template("from scratch")
    before, middle, rest = FORMS["from scratch"]
    steer(lambda _: f"{before}look{middle}{rest}")
    reply = policy.bind_tools([look], tool_choice="look").invoke("Hello", stop=["\n"])
    assert reply.tool_calls[0]["args"] == {"place": "box"}, "the line end in what is forced stops nothing"
    reply = policy.bind_tools([look]).invoke("Hello", stop=["box"])
    assert reply.invalid_tool_calls and reply.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("schema", [Answer, Answer.model_json_schema()])
@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_output(schema: Any, method: str, of_template: Make, steer: Steer) -> None:
    policy = of_template("qwen2.5")
    answer = '{"item": "apple", "number": 2}'
    steer(lambda request: f"{request.forced} {answer}}}\n</tool_call>" if request.tool_names else answer)
    model = policy.with_structured_output(schema, method=method)
    expected = Answer(item="apple", number=2)
    assert model.invoke("What?") == (expected if schema is Answer else expected.model_dump())
    assert list(model.stream("What?"))[-1] == model.invoke("What?")
    steer(lambda request: f'{request.forced or "{"} "item": "app')
    with_raw: Any = policy.with_structured_output(schema, method=method, include_raw=True).invoke("What?")
    assert with_raw["parsed"] is None and isinstance(with_raw["raw"], AIMessage), "what is cut is not mended"
    if method != "function_calling":
        with pytest.raises(OutputParserException, match="the reply is no JSON object"):
            model.invoke("What?")


def test_a_json_reply_is_parsed_where_it_can_be(of_template: Make, steer: Steer) -> None:
    policy = of_template("from scratch")
    form = {"type": "json_schema", "json_schema": {"name": "Answer", "schema": Answer.model_json_schema()}}
    steer(lambda _: '{"item": "apple"}')
    with TokenRecorder() as recorder:
        reply = policy.invoke("What?", response_format=form)
    given = policy.tokenizer.decode(recorder.calls[0].prompt_ids)
    assert json.dumps(Answer.model_json_schema()) in given and given.endswith("<|assistant|>{")
    assert json.loads(reply.text) == reply.additional_kwargs["parsed"] == {"item": "apple"}
    streamed = list(policy.stream("What?", response_format=form))
    assert "".join(chunk.text for chunk in streamed) == reply.text
    assert streamed[-1].additional_kwargs["parsed"] == {"item": "apple"}
    steer(lambda _: '{"item": ')
    assert "parsed" not in policy.invoke("What?", response_format=form).additional_kwargs
    with TokenRecorder() as recorder:
        policy.invoke("What?", response_format=Answer)
    given = policy.tokenizer.decode(recorder.calls[0].prompt_ids)
    assert '{"title": "Answer"' in given and given.endswith("<|assistant|>{")
    with pytest.raises(ConfigurationError, match="unknown type of response_format 'yaml'"):
        policy.invoke("What?", response_format={"type": "yaml"})


@pytest.mark.parametrize(
    "strategy", [ToolStrategy, ProviderStrategy, pytest.param(lambda schema: schema, id="chosen by LangChain")]
)
def test_agents_with_a_response_format(strategy: Any, of_template: Make, steer: Steer) -> None:
    policy = of_template("from scratch")

    def say(request: Request) -> str:
        looked = any(message["role"] == "tool" for message in request.conversation)
        if not looked:
            return '<tool_call>\n{"name": "look", "arguments": {"place": "box"}}\n</tool_call>'
        if request.wants_json:
            return '{"item": "apple"}'
        return '<tool_call>\n{"name": "Answer", "arguments": {"item": "apple"}}\n</tool_call>'

    steer(lambda request: say(request) if say(request).startswith(request.forced) else f"{request.forced}look")
    agent = create_agent(policy, [look], response_format=strategy(Answer))
    with TokenRecorder() as recorder:
        state = agent.invoke({"messages": [HumanMessage("What is in the box?")]})
    assert state["structured_response"] == Answer(item="apple")
    assert len(recorder.calls) == 2
