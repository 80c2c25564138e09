"""Calls that LangChain refuses are refused in its words, so that every caller of a dream sees what a graph would."""

from typing import Annotated, Any, Literal

import pytest
from langchain_core.messages import AIMessage
from langchain_core.tools import BaseTool, tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode
from orders import ORDER, order_task
from orders import tool as schema
from pydantic import BaseModel

from dreamgym_lg.actions import render_answer, render_call, tool_schemas
from dreamgym_lg.dream import Answer, Episode, Schemas
from dreamgym_lg.types import Task


class Item(BaseModel):
    name: str
    count: int = 1


@tool
def get_order(order_id: str) -> str:
    """Look up an order."""
    return "paid"


@tool
def refund(order_id: str, amount: float, reason: Literal["late", "lost"] = "late", items: list[Item] | None = None) -> str:
    """Refund an order."""
    return "refunded"


@tool
def note(text: str, state: Annotated[dict[str, Any], InjectedState]) -> str:
    """Add a note."""
    return "noted"


TOOLS: list[BaseTool] = [get_order, refund, note]
TASK = order_task(tools=tool_schemas(TOOLS))


def by_langgraph(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """What a real `ToolNode` answers, and whether it called the tool."""
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "tools")
    graph.add_edge("tools", END)
    call = {"name": name, "args": arguments, "id": "1", "type": "tool_call"}
    message = graph.compile().invoke({"messages": [AIMessage("", tool_calls=[call])]})["messages"][-1]
    return str(message.content), message.status != "error"


def by_schemas(part: Schemas, name: str, arguments: dict[str, Any], task: Task = TASK) -> Answer | None:
    return part.respond(Episode(task=task, action=render_call(name, arguments)))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("get_orders", {"order_id": "W-204"}),
    ("get_order", {}),
    ("get_order", {"order_id": 204}),
    ("get_order", {"id": "W-204"}),
    ("refund", {"amount": "much"}),
    ("refund", {"amount": 1, "order_id": "W-204", "reason": "bored"}),  # arguments in the order in which an action has them
    ("refund", {"amount": 1, "items": [{"count": "two"}], "order_id": "W-204"}),
    ("note", {}),
]
TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("get_order", {"order_id": "W-204", "more": 1}),
    ("refund", {"order_id": "W-204", "amount": "20"}),
    ("refund", {"order_id": "W-204", "amount": 1, "items": [{"name": "lamp"}]}),
    ("note", {"text": "angry"}),
]


@pytest.mark.parametrize(("name", "arguments"), REFUSED)
def test_what_langgraph_refuses_is_refused_in_its_words(name: str, arguments: dict[str, Any]) -> None:
    text, called = by_langgraph(name, arguments)
    assert not called and by_schemas(Schemas(TOOLS), name, arguments) == Answer(text, valid=False)


@pytest.mark.parametrize(("name", "arguments"), TAKEN)
def test_what_langgraph_takes_is_left_to_the_next_part(name: str, arguments: dict[str, Any]) -> None:
    assert by_langgraph(name, arguments)[1] and by_schemas(Schemas(TOOLS), name, arguments) is None
    assert by_schemas(Schemas(), name, arguments) is None


@pytest.mark.parametrize(("name", "arguments"), [REFUSED[0], REFUSED[1], REFUSED[3], REFUSED[7]])
def test_the_tasks_schemas_know_names_and_required_arguments(name: str, arguments: dict[str, Any]) -> None:
    assert by_schemas(Schemas(), name, arguments) == Answer(by_langgraph(name, arguments)[0], valid=False)


@pytest.mark.parametrize("tools", [[], None], ids=["a trace without schemas", "a text agent"])
def test_nothing_is_refused_of_which_nothing_is_known(tools: Any) -> None:
    task = order_task(tools=tools)
    assert by_schemas(Schemas(), "anything", {}, task) is None
    for name in ("get_order", "refund"):
        assert by_schemas(Schemas(), name, {}, order_task(tools=["get_order"])) is None, "names that traces called"
    assert by_schemas(Schemas(), "get_order", {}, order_task(tools=[schema("get_order", parameters=None)])) is None


@pytest.mark.parametrize(
    "action", ['{"name": "get_order", "arguments": "{"}', "look around", "", "[]", '{"name": "get_order"}']
)
def test_what_is_neither_a_call_nor_a_message_is_refused(action: str) -> None:
    answer = Schemas().respond(Episode(task=TASK, action=action))
    assert answer == Answer("Error: this is neither a tool call nor a message.", valid=False)
    assert Schemas().respond(Episode(task=order_task(tools=None), action=action)) is None, "a text agent may say anything"


def test_a_call_in_any_spelling_is_taken() -> None:
    assert Schemas(TOOLS).respond(Episode(task=TASK, action=ORDER.replace(" ", ""))) is None
    assert Schemas(TOOLS).respond(Episode(task=TASK, action=render_answer("Done."))) is not None, "messages are the user's"
