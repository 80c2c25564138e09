"""Ordinary agents that talk with a customer, as users write them; also imported in a worker, behind the wall."""

from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from typing_extensions import TypedDict
from zoo.models import ScriptedModel

from dreamgym_lg.types import Task

ORDERS = {"W-1": "shipped", "W-2": "lost"}


@tool
def look_up(order: str) -> str:
    """Look an order up."""
    return ORDERS[order]


@tool
def refund(order: str) -> str:
    """Refund an order."""
    ORDERS[order] = "refunded"
    return "done"


@tool(return_direct=True)
def hand_over(summary: str) -> str:
    """Hand the customer over to a person."""
    return "a person takes over"


def desk(**options: Any) -> Any:
    """Production's model would say nothing of use: whoever talks is the policy."""
    return create_agent(ScriptedModel(label="production"), [look_up, refund, hand_over], system_prompt="Be kind.", **options)


def threaded() -> Any:
    return desk(checkpointer=InMemorySaver())


class Payload(TypedDict, total=False):
    """A state of its own, without messages."""

    request: str
    log: list[BaseMessage]
    answer: str


def own_payload() -> Any:
    model = ScriptedModel(label="production")

    def answer(state: Payload) -> Payload:
        log = [*state.get("log", ()), ("user", state["request"])]
        message = model.invoke(log)
        return {"log": [*log, message], "answer": message.text}  # type: ignore[list-item]

    return StateGraph(Payload).add_node("answer", answer).add_edge(START, "answer").compile()


def asks(task: Task) -> Payload:
    return {"request": task.instruction}


def answer_of(state: Payload) -> str:
    return state["answer"]


def hears(state: Payload, reply: str) -> Payload:
    return {**state, "request": reply}


def asks_by_interrupt() -> Any:
    """Asks for the order in the middle of a run."""
    model = ScriptedModel(label="production")

    def answer(state: dict) -> dict[str, Any]:
        order = interrupt("Which order?")
        colour = interrupt({"question": "Which colour?"})
        return {"messages": [*state["messages"], model.invoke([("user", f"{order}, {colour}")])]}

    return StateGraph(dict).add_node("answer", answer).add_edge(START, "answer").compile(checkpointer=InMemorySaver())
