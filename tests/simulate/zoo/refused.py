"""Agents that no dreamed episode can be right with, and the words by which each is told what to do."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

from deepagents import create_deep_agent
from deepagents.backends import FilesystemBackend
from langchain.agents import create_agent
from langchain_core.language_models import FakeListLLM
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langchain_openai.middleware import OpenAIModerationMiddleware
from langgraph.graph import MessagesState
from langgraph.pregel.remote import RemoteGraph
from openai import AsyncOpenAI, OpenAI

from zoo.base import World, react, single, toolbox
from zoo.packages import servers

Refused = Callable[[World], Any]


def _node(act: Callable[[MessagesState], Any], act_async: Any = None) -> Any:
    async def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [("ai", str(await act_async(state)))]}

    return single(node if act_async else lambda state: {"messages": [("ai", str(act(state)))]})


def tool_func(world: World) -> Any:
    @tool
    def book(city: str) -> str:
        """Book a room."""
        world.passed.append(city)
        return f"booked {city}"

    return _node(lambda state: book.func("Rome"))


def tool_coroutine(world: World) -> Any:
    @tool
    async def book(city: str) -> str:
        """Book a room."""
        world.passed.append(city)
        return f"booked {city}"

    tools = {"book": book}
    return _node(lambda state: asyncio.run(tools["book"].coroutine("Rome")))


def completion_model(world: World) -> Any:
    model = FakeListLLM(responses=["production"])
    return _node(lambda state: model.invoke("book a room"))


def remote_graph(world: World) -> Any:
    remote = RemoteGraph("agent", url=f"http://127.0.0.1:{world.port}")
    return _node(lambda state: remote.invoke(state))


def provider_client(world: World) -> Any:
    client = OpenAI(api_key="none", base_url=f"http://127.0.0.1:{world.port}", max_retries=0)
    return _node(lambda state: client.responses.create(model="gpt-x", input="book a room"))


def moderation(world: World) -> Any:
    model = ChatOpenAI(model="gpt-x", api_key="none", base_url=f"http://127.0.0.1:{world.port}", max_retries=0)
    client = AsyncOpenAI(api_key="none", base_url=f"http://127.0.0.1:{world.port}", max_retries=0)
    return create_agent(model, [toolbox(world)[0]], middleware=[OpenAIModerationMiddleware(async_client=client)])


def files_of_a_deep_agent(world: World) -> Any:
    backend = FilesystemBackend(root_dir=world.folder, virtual_mode=True)
    return create_deep_agent(world.scripted(sequence=("write_file",)), backend=backend)


def open_database(world: World) -> Any:
    database = sqlite3.connect(world.folder / "rows.db", isolation_level=None, check_same_thread=False)
    return _node(lambda state: database.execute("CREATE TABLE IF NOT EXISTS t (a)").fetchall())


def open_session(world: World) -> Any:
    """A session with an MCP server, held open in a loop of its own."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[Any]()

    async def serve() -> None:
        async with servers(world).session("hotel") as session:
            found.append(session)
            ready.set()
            await asyncio.Event().wait()

    threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True).start()
    ready.wait(20)
    session = found[0]

    def act(state: MessagesState) -> str:
        return str(asyncio.run_coroutine_threadsafe(session.call_tool("book", {"city": "Rome"}), loop).result(20))

    return _node(act)


def embedded_file(world: World) -> Any:
    file = (world.folder / "log").open("w", buffering=1)
    return react(world.model, toolbox(world), tool_node=_node(lambda state: file.write("booked\n")))


REFUSED: list[tuple[Refused, str, str]] = [
    (tool_func, "not simulated", r"it calls tool\.func\(\.\.\.\), which really runs .*: use tool\.invoke\(\.\.\.\)"),
    (tool_coroutine, "not simulated", r"it calls tool\.coroutine\(\.\.\.\), .* use await tool\.ainvoke\(\.\.\.\)"),
    (completion_model, "not simulated", "no policy answers for it: use its chat-model class"),
    (remote_graph, "stopped", "it runs on a server: use the graph itself instead"),
    (provider_client, "stopped", "call the model through its LangChain class"),
    (moderation, "stopped", "allow that host, or build the agent without it to train it"),
    (files_of_a_deep_agent, "stopped", "build the agent with StateBackend to train it"),
    (open_database, "could leak", "move it into a tool, or name the node in simulate_nodes"),
    (open_session, "could leak", "written to an open connection: move it into a tool, or name the node in simulate_nodes"),
    (embedded_file, "could leak", "no guard sees what is written to an open file"),
]
"""Builder of the graph, its worst part's fate, and what it is told."""
