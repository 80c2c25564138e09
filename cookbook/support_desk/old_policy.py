"""The old policy that made the shop's traces: rules in the place of a chat model, often good, often sloppy.

It reads what a chat model reads, what the customer said and the tools answered, and knows nothing else.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

from agent import TOOLS, create_desk
from customers import agreed, answer
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph.state import CompiledStateGraph
from tickets import Shop

from dreamgym_lg import Task

Habit = Literal["good", "wrong_tool", "wrong_argument", "no_lookup", "answers_at_once", "escalates_at_once", "asks_no_leave"]
HABITS: Mapping[Habit, int] = {
    "good": 25,
    "wrong_tool": 15,
    "wrong_argument": 15,
    "no_lookup": 15,
    "answers_at_once": 15,
    "escalates_at_once": 15,
}
"""How often in a hundred tickets the old policy works in which way."""
TALKING_HABITS: Mapping[Habit, int] = {**HABITS, "good": 35, "asks_no_leave": 15}
"""The same of the desk that talks; some of its changes nobody agreed to."""
WRITES = ("refund", "cancel", "set_city", "escalate")

READ_BACK = {
    "refund": "Shall I refund order {order_id}?",
    "cancel": "Shall I cancel order {order_id}?",
    "escalate": "Shall I hand order {order_id} to a colleague?",
    "set_city": "Shall I send it to {city}?",
}

Call = Callable[..., dict[str, Any]]
"""Calls a tool by name, with its arguments, and returns its answer."""
Ask = Callable[[str], str]
"""Asks the customer a question, and returns the reply."""


class OldPolicy(BaseChatModel):
    """Answers as the old policy would: always in the way of `habit`, or without one in a way drawn by ticket and seed.

    Where it `talks`, it asks the customer for what is missing, and before it changes anything.
    """

    habit: Habit | None = None
    seed: int = 0
    talks: bool = False

    @property
    def _llm_type(self) -> str:
        return "old-policy"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        ticket, *replies = [message.text for message in messages if isinstance(message, HumanMessage)]
        rng, habits = Random(f"{self.seed}/{ticket}"), TALKING_HABITS if self.talks else HABITS
        habit = self.habit or rng.choices(list(habits), list(habits.values()))[0]
        call = partial(_next, iter([json.loads(message.text) for message in messages if isinstance(message, ToolMessage)]))
        ask = partial(_reply, iter(replies)) if self.talks else None
        if ask is not None and habit != "asks_no_leave":
            call = partial(_with_leave, call, ask)
        try:
            reply = AIMessage(deal_with(ticket, habit, partial(SLOPPY[habit], call, rng) if habit in SLOPPY else call, ask))
        except _NotAnswered as wanted:
            name, arguments = wanted.args
            reply = AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call_{len(messages)}"}])
        except _Says as said:
            reply = AIMessage(str(said))
        return ChatResult(generations=[ChatGeneration(message=reply)])


class _NotAnswered(Exception):
    """The call that has to be made next: (name, arguments)."""


def _next(answers: Iterator[dict[str, Any]], name: str, **arguments: Any) -> dict[str, Any]:
    """The recorded answer of a tool: the ticket is dealt with from its beginning at every reply."""
    if (answer := next(answers, None)) is None:
        raise _NotAnswered(name, arguments)
    return answer


class _Says(Exception):
    """What has to be said next."""


def _reply(replies: Iterator[str], question: str) -> str:
    if (reply := next(replies, None)) is None:
        raise _Says(question)
    return reply


def _with_leave(call: Call, ask: Ask, name: str, **arguments: Any) -> dict[str, Any]:
    """Reads a change back, and makes it after a yes."""
    if name in WRITES and not ask(READ_BACK[name].format(**arguments)).startswith("Yes"):
        raise _Says("Then I leave everything as it is.")
    return call(name, **arguments)


def _completed(ticket: str, ask: Ask) -> str:
    """The ticket with what the customer left out."""
    if not re.search(r"[KC]\d+", ticket):
        number = "What is your customer number?" if "last order" in ticket else "Which order is it?"
        ticket = f"{ticket} {ask(number)}"
    if re.search(r"another city|new city", ticket):
        ticket = f"It has to go to {ask('To which city?').rstrip('.').split()[-1]}. {ticket}"
    return ticket


def deal_with(ticket: str, habit: Habit, call: Call, ask: Ask | None = None) -> str:
    """Deal with a ticket by the shop's rules, calling tools; returns the answer to the customer."""
    if habit == "answers_at_once":
        return "It is delivered."
    ticket = _completed(ticket, ask) if ask is not None else ticket
    known = {found: call("get_customer", customer_id=found) for found in re.findall(r"C\d+", ticket)}
    if any("error" in customer for customer in known.values()):
        return "I cannot find you."
    orders = re.findall(r"K\d+", ticket) or [customer["last_order"] for customer in known.values()]
    if habit == "escalates_at_once":
        return _escalated(orders[0], "shipped", call)
    return " ".join([_deal_with_order(ticket, order, known, call) for order in orders])


def _deal_with_order(ticket: str, order: str, known: dict[str, Any], call: Call) -> str:
    found = call("get_order", order_id=order)
    status, id = found.get("status"), found.get("customer", "C1000")

    def customer() -> dict[str, Any]:
        if id not in known:
            known[id] = call("get_customer", customer_id=id)
        return known[id]

    city = re.search(r"(?:Send order K\d+|moved|has to go) to (\w+)", ticket)
    if "where" in ticket.casefold():
        return f"Order {order} is {status}, for {customer().get('city')}."
    if "broken" in ticket:
        return _refunded(order, call) if customer().get("tier") == "gold" else _escalated(order, "broken", call)
    if city and status == "open":
        call("set_city", customer_id=id, city=city[1])
        return f"Order {order} goes to {city[1]}."
    if city and status != "shipped":
        return f"Order {order} went to {customer().get('city')}."
    if status == "open":
        call("cancel", order_id=order)
        return f"Order {order} is cancelled."
    if status == "delivered":
        return _refunded(order, call)
    return _escalated(order, "final" if status == "final" else "shipped", call)


def _refunded(order: str, call: Call) -> str:
    call("refund", order_id=order)
    return f"Order {order} is refunded."


def _escalated(order: str, reason: str, call: Call) -> str:
    call("escalate", order_id=order, reason=reason)
    return f"A colleague sees to order {order}."


def _wrong_tool(call: Call, rng: Random, name: str, **arguments: Any) -> dict[str, Any]:
    """Writes with another tool than the one that is right."""
    if name not in WRITES:
        return call(name, **arguments)
    other = rng.choice([tool for tool in ("refund", "cancel", "escalate") if tool != name])
    reason = {"reason": "final"} if other == "escalate" else {}
    return call(other, order_id=next(iter(arguments.values())), **reason)


def _wrong_argument(call: Call, rng: Random, name: str, **arguments: Any) -> dict[str, Any]:
    """Gets a digit of an id or the last argument wrong, every second time."""
    if rng.random() < 0.5:
        *_, last = arguments
        others = {"reason": ("shipped", "final", "broken"), "city": ("Oslo", "Lund", "Bonn")}
        wrong = others.get(last) or [f"{arguments[last][:-1]}{digit}" for digit in range(10)]
        arguments[last] = rng.choice([value for value in wrong if value != arguments[last]])
    return call(name, **arguments)


def _no_lookup(call: Call, rng: Random, name: str, **arguments: Any) -> dict[str, Any]:
    """Looks nothing up but what a customer's last order is, and takes for granted what the shop mostly sees."""
    if name == "get_order":
        return {"status": rng.choice(("open", "shipped", "delivered"))}
    if name == "get_customer" and arguments["customer_id"] == "C1000":
        return {"tier": rng.choice(("gold", "plain")), "city": "Oslo"}
    return call(name, **arguments)


SLOPPY: Mapping[Habit, Callable[..., dict[str, Any]]] = {
    "wrong_tool": _wrong_tool,
    "wrong_argument": _wrong_argument,
    "no_lookup": _no_lookup,
}
"""What becomes of a call that is right."""


def talking_desk() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The desk that talks, as it ran so far."""
    return create_desk(OldPolicy(talks=True), talking=True)


def write_traces(path: Path, shop: Shop, tasks: Sequence[Task], *, seed: int, talking: bool = False) -> None:
    """Let the old policy deal with every ticket, and write what it did as `load_traces` reads it, a conversation a line."""
    tools = [convert_to_openai_tool(tool) for tool in TOOLS]
    policy = OldPolicy(seed=seed, talks=talking)
    desk = create_desk(policy, talking=talking)
    with path.open("w") as file:
        for number, task in enumerate(tasks):
            if talking:  # many customers who leave things out say the same: their seeds differ
                policy.seed = 1000 * seed + number
            with shop.fresh():
                messages = converse(desk, task, talking=talking)
                success = shop.solved(task, messages[-1].text) and (not talking or agreed(messages))
            row = {"messages": convert_to_openai_messages(messages), "tools": tools, "success": success}
            file.write(json.dumps({**row, "rubric": task.rubric, "metadata": dict(task.metadata)}) + "\n")


def converse(desk: Any, task: Task, *, talking: bool) -> list[BaseMessage]:
    """The messages of desk and customer until one of them has nothing more to say; without `talking`, one of each."""
    messages: list[BaseMessage] = [HumanMessage(task.instruction)]
    while True:
        messages = desk.invoke({"messages": messages})["messages"]
        if not talking or (reply := answer(task, messages[-1].text)) is None:
            return messages
        messages.append(HumanMessage(reply))
