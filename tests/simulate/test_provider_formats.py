"""What production binds, in the one form that a policy knows."""

from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from dreamgym_lg import with_policy
from dreamgym_lg.simulate.models import normalise

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WANTED = {"type": "function", "function": {"name": "book", "description": "Book.", "parameters": SCHEMA}}
ANSWER = {"title": "Answer", "description": "Book.", **SCHEMA}


@tool
def book(city: str) -> str:
    """Book."""
    return city


class Answer(BaseModel):
    """Book."""

    city: str


TOOLS: dict[str, dict[str, Any]] = {
    "openai": {"tools": [WANTED]},
    "openai responses": {"tools": [{"type": "function", "name": "book", "description": "Book.", "parameters": SCHEMA}]},
    "openai functions": {"functions": [{"name": "book", "description": "Book.", "parameters": SCHEMA}]},
    "anthropic": {"tools": [{"name": "book", "description": "Book.", "input_schema": SCHEMA}]},
    "bedrock": {"tools": [{"toolSpec": {"name": "book", "description": "Book.", "inputSchema": {"json": SCHEMA}}}]},
    "bedrock config": {
        "toolConfig": {"tools": [{"toolSpec": {"name": "book", "description": "Book.", "inputSchema": {"json": SCHEMA}}}]}
    },
    "a tool": {"tools": [book]},
    "beside the provider's own": {"tools": [{"type": "web_search_20250305", "name": "web_search"}, WANTED]},
}


@pytest.mark.parametrize("bound", TOOLS.values(), ids=TOOLS)
def test_tools(bound: dict[str, Any]) -> None:
    (found,) = normalise(bound)["tools"]
    assert found["type"] == "function" and found["function"]["name"] == "book"
    assert found["function"]["description"] == "Book."
    parameters = found["function"]["parameters"]
    assert parameters["properties"]["city"]["type"] == "string" and parameters["required"] == ["city"]


GOOGLE = SimpleNamespace(
    model_dump=lambda **_: {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["book"]}}
)
CHOICES: list[tuple[Any, str | None]] = [
    (None, None),
    ("auto", None),
    ({"type": "auto"}, None),
    ({"auto": {}}, None),
    (False, None),
    ("none", "none"),
    ({"type": "none"}, "none"),
    ("any", "required"),
    ("required", "required"),
    (True, "required"),
    ({"type": "any"}, "required"),
    ({"any": {}}, "required"),
    ("book", "book"),
    ({"type": "function", "function": {"name": "book"}}, "book"),
    ({"type": "function", "name": "book"}, "book"),
    ({"type": "tool", "name": "book", "disable_parallel_tool_use": True}, "book"),
    ({"tool": {"name": "book"}}, "book"),
]


@pytest.mark.parametrize(("choice", "wanted"), CHOICES, ids=[str(choice) for choice, _ in CHOICES])
def test_tool_choice(choice: Any, wanted: str | None) -> None:
    assert normalise({"tools": [WANTED], "tool_choice": choice}).get("tool_choice") == wanted
    in_config = {"toolConfig": {"tools": TOOLS["bedrock"]["tools"], "toolChoice": choice}}
    assert normalise(in_config).get("tool_choice") == wanted


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"function_calling_config": {"mode": "AUTO"}}, None),
        ({"function_calling_config": {"mode": "NONE"}}, "none"),
        ({"function_calling_config": {"mode": "ANY"}}, "required"),
        ({"function_calling_config": {"mode": "VALIDATED"}}, None),
        ({"function_calling_config": {"mode": "ANY", "allowed_function_names": ["a", "b"]}}, "required"),
        (GOOGLE, "book"),
    ],
)
def test_googles_tool_config(config: Any, wanted: str | None) -> None:
    assert normalise({"tools": [WANTED], "tool_config": config}).get("tool_choice") == wanted


def test_a_choice_without_tools_means_nothing() -> None:
    assert normalise({"tool_choice": "required", "temperature": 0.2, "max_tokens": 5}) == {}


NOTE = {"schema": ANSWER, "kwargs": {"method": "json_schema"}}
RESPONSES: dict[str, dict[str, Any]] = {
    "openai": {"response_format": {"type": "json_schema", "json_schema": {"name": "Answer", "schema": SCHEMA, "strict": True}}},
    "openai with a class": {"response_format": Answer},
    "openai responses": {"response_format": {"type": "json_schema", "name": "Answer", "schema": SCHEMA}},
    "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": ANSWER}}},
    "google": {"response_json_schema": ANSWER, "response_mime_type": "application/json"},
    "ollama": {"format": ANSWER},
    "langchain's note": {"ls_structured_output_format": NOTE, "response_format": {"type": "json_object"}},
    "langchain's note of a class": {"ls_structured_output_format": {**NOTE, "schema": Answer}},
}


@pytest.mark.parametrize("bound", RESPONSES.values(), ids=RESPONSES)
def test_response_format(bound: dict[str, Any]) -> None:
    wanted = normalise(bound)["response_format"]
    assert wanted["type"] == "json_schema" and wanted["json_schema"]["name"] == "Answer"
    schema = wanted["json_schema"]["schema"]
    assert schema["type"] == "object" and schema["properties"]["city"]["type"] == "string" and schema["required"] == ["city"]


@pytest.mark.parametrize("bound", [{"response_format": {"type": "text"}}, {"format": "json"}, {"response_format": "x"}, {}])
def test_no_schema_is_no_format(bound: dict[str, Any]) -> None:
    assert normalise(bound) == {}


def test_a_schema_asked_for_by_a_tool_is_that_tool() -> None:
    note = {"schema": SCHEMA, "kwargs": {"method": "function_calling"}}
    assert normalise({"tools": [WANTED], "ls_structured_output_format": note})["tool_choice"] == "book"
    assert "response_format" not in normalise({"tools": [WANTED], "ls_structured_output_format": note})


class Provider(BaseChatModel):
    """Takes tools in a form of its own, as providers do; answers with what it was sent."""

    _llm_type = "provider"

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **kwargs: Any) -> Any:
        return self.bind(shape=[tool["function"]["name"] for tool in tools], choice=tool_choice, **kwargs)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **sent: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"{stop} {sent}"))])


@pytest.mark.parametrize("choice, sent", [("required", "any"), ("book", "book"), (None, None)])
def test_a_policys_class_sends_the_tools_in_its_own_form(choice: Any, sent: Any) -> None:
    production = FakeListChatModel(responses=["production"])

    def node(state: MessagesState) -> dict[str, Any]:
        model = production.bind(tools=[WANTED], **({"tool_choice": choice} if choice else {}))
        return {"messages": [model.invoke(state["messages"], stop=["."])]}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
    state = with_policy(graph, Provider()).invoke({"messages": [("human", "?")]})
    assert state["messages"][-1].text == f"['.'] {{'shape': ['book'], 'choice': {sent!r}}}"
