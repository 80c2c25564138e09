"""A support desk in production: an agent whose tools read and write a real SQLite file."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool

Reply = Callable[[list[BaseMessage]], AIMessage]


class Model(BaseChatModel):
    """A chat model that replies by a function of the conversation."""

    label: str
    reply: Reply

    @property
    def _llm_type(self) -> str:
        return self.label

    def bind_tools(self, tools: Any, **_: Any) -> "Model":
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.reply(messages))])


def call(name: str, **given: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": given, "id": f"{name}-{len(given)}"}])


def turn(messages: list[BaseMessage]) -> tuple[str, list[BaseMessage]]:
    """The order of the last request, and what came after that."""
    last = max(number for number, each in enumerate(messages) if each.type == "human")
    return messages[last].text.split()[-1], messages[last + 1 :]


def careful(messages: list[BaseMessage]) -> AIMessage:
    """Looks the order up, cancels it unless it is shipped, and says so."""
    order, since = turn(messages)
    if not since:
        return call("get_order", order=order)
    if len(since) == 2 and "shipped" not in since[-1].text:
        return call("cancel_order", order=order, reason="asked for")
    return AIMessage(f"Order {order}: {since[-1].text}")


def rash(messages: list[BaseMessage]) -> AIMessage:
    """Cancels at once."""
    order, since = turn(messages)
    return AIMessage("Done.") if since else call("cancel_order", order=order, reason="at once")


def broken(messages: list[BaseMessage]) -> AIMessage:
    raise ConnectionError("sk-secret of the provider")


class Desk:
    """Its orders lie in a file; `cancelled` are those that a tool really cancelled, with the reasons."""

    def __init__(self, folder: Path, reply: Reply = careful, **options: Any) -> None:
        self.file = folder / "orders.db"
        with closing(sqlite3.connect(self.file)) as db, db:
            db.execute("CREATE TABLE orders (id TEXT PRIMARY KEY, status TEXT)")
            db.execute("CREATE TABLE cancelled (id TEXT, reason TEXT)")
            db.executemany("INSERT INTO orders VALUES (?, ?)", [("A1", "open"), ("A2", "shipped"), ("A3", "open")])
        file = self.file

        @tool
        def get_order(order: str) -> str:
            """Look up an order."""
            with closing(sqlite3.connect(file)) as db:
                found = db.execute("SELECT status FROM orders WHERE id = ?", (order,)).fetchone()
            return found[0] if found else "unknown order"

        @tool
        def cancel_order(order: str, reason: str) -> str:
            """Cancel an order."""
            with closing(sqlite3.connect(file)) as db, db:
                db.execute("INSERT INTO cancelled VALUES (?, ?)", (order, reason))
                db.execute("UPDATE orders SET status = 'cancelled' WHERE id = ?", (order,))
            return "cancelled"

        self.graph: Any = create_agent(Model(label="production", reply=reply), [get_order, cancel_order], **options)

    @property
    def cancelled(self) -> list[tuple[str, str]]:
        with closing(sqlite3.connect(self.file)) as db:
            return db.execute("SELECT * FROM cancelled").fetchall()


def policy(reply: Reply = careful) -> Model:
    return Model(label="policy", reply=reply)


def ask(order: str) -> dict[str, Any]:
    return {"messages": [("human", f"Please cancel order {order}")]}


def in_thread(name: object) -> Any:
    return {"configurable": {"thread_id": str(name)}}
