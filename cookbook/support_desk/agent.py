"""The agent: a shop's support desk, an ordinary `create_agent` graph with six tools over SQLite, and the one that talks.

It knows nothing of dreamgym-lg, and nothing in it was made for it.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langgraph.graph.state import CompiledStateGraph

RULES = {
    "money": "Money back: cancel an open order; refund a delivered one; escalate a shipped or a final one.",
    "address": "New address: set the city while the order is open; escalate a shipped one; else say its city.",
    "broken": "Broken: refund gold customers, escalate others.",
    "where": "Where is it: say status and city.",
}
"""The shop's policy, by what the customer wants."""
SYSTEM_PROMPT = "\n".join(["You are a shop's support desk. Look up before you act.", *RULES.values()])

TALKING_PROMPT = f"{SYSTEM_PROMPT}\nAsk for what the customer left out. Say what you will change, and wait for a yes."

_connection: ContextVar[sqlite3.Connection] = ContextVar("connection")
connection_in_use = _connection.get


@contextmanager
def connected(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """The block serves one request: the tools use this connection."""
    token = _connection.set(connection)
    try:
        yield connection
    finally:
        _connection.reset(token)


def get_order(order_id: str) -> dict[str, Any]:
    """Look up an order."""
    row = connection_in_use().execute("SELECT item, status, customer FROM orders WHERE id = ?", [order_id]).fetchone()
    if row is None:
        return {"error": f"no order {order_id}"}
    return dict(zip(("item", "status", "customer"), row, strict=True))


def get_customer(customer_id: str) -> dict[str, Any]:
    """Look up a customer."""
    found = (
        "SELECT tier, city, (SELECT id FROM orders WHERE customer = c.id ORDER BY days LIMIT 1) FROM customers c WHERE id = ?"
    )
    row = connection_in_use().execute(found, [customer_id]).fetchone()
    if row is None:
        return {"error": f"no customer {customer_id}"}
    return dict(zip(("tier", "city", "last_order"), row, strict=True))


def refund(order_id: str) -> dict[str, Any]:
    """Pay back a delivered order."""
    return _close(order_id, "delivered", "refunded")


def cancel(order_id: str) -> dict[str, Any]:
    """Cancel an open order."""
    return _close(order_id, "open", "cancelled")


def set_city(customer_id: str, city: str) -> dict[str, Any]:
    """Change a customer's city."""
    connection = connection_in_use()
    if not connection.execute("UPDATE customers SET city = ? WHERE id = ?", [city, customer_id]).rowcount:
        return {"error": f"no customer {customer_id}"}
    connection.commit()
    return {"city": city}


def escalate(order_id: str, reason: Literal["shipped", "final", "broken"]) -> dict[str, Any]:
    """Hand an order to a colleague."""
    if "error" in (found := get_order(order_id)):
        return found
    connection = connection_in_use()
    connection.execute("INSERT INTO cases VALUES (?, ?)", [order_id, reason])
    connection.commit()
    return {"case": reason}


def _close(order_id: str, before: str, after: str) -> dict[str, Any]:
    """Give an order of one status another one."""
    if "error" in (found := get_order(order_id)):
        return found
    if found["status"] != before:
        return {"error": f"it is {found['status']}"}
    connection = connection_in_use()
    connection.execute("UPDATE orders SET status = ? WHERE id = ?", [after, order_id])
    connection.commit()
    return {"status": after}


TOOLS = [get_order, get_customer, refund, cancel, set_city, escalate]


def create_desk(model: BaseChatModel | str, *, talking: bool = False) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The agent, with any chat model. Args: `talking`, the one that asks and confirms in a conversation."""
    graph = create_agent(model, TOOLS, system_prompt=TALKING_PROMPT if talking else SYSTEM_PROMPT)
    return graph.with_config(recursion_limit=14)  # a model that calls for ever is cut short after seven calls
