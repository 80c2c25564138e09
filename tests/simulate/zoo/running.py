"""Threads, tasks and persistence."""

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import uuid4

from langchain_core.messages import AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph, add_messages
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore

from zoo.base import Built, World, answered, ask, kinds, react, toolbox


def functional_api(world: World) -> Built:
    """@entrypoint and @task: a Pregel that is no StateGraph."""
    book, pay, _ = toolbox(world)
    tools = {"book": book, "pay": pay}

    @task
    def think(messages: list[AnyMessage]) -> AnyMessage:
        return world.model.bind_tools(list(tools.values())).invoke(messages)

    @task
    def act(call: Any) -> ToolMessage:
        return tools[call["name"]].invoke(call)

    @entrypoint()
    def agent(question: str) -> dict[str, Any]:
        messages: Any = [HumanMessage(question)]
        while True:
            reply = think(messages).result()
            messages = add_messages(messages, [reply])
            if not reply.tool_calls:
                return {"messages": messages}
            messages = add_messages(messages, [future.result() for future in [act(call) for call in reply.tool_calls]])

    world.scripted(per_reply=2)
    return Built(graph=agent, payload="a room", tools=["book", "pay"], mode="sync", expect=answered(2))


def functional_api_async(world: World) -> Built:
    book = toolbox(world)[0]

    @task
    async def think(messages: list[AnyMessage]) -> AnyMessage:
        return await world.model.bind_tools([book]).ainvoke(messages)

    @entrypoint(checkpointer=InMemorySaver())
    async def agent(question: str) -> dict[str, Any]:
        messages = [HumanMessage(question)]
        reply = await think(messages)
        messages += [reply, *await asyncio.gather(*(book.ainvoke(call) for call in reply.tool_calls))]
        return {"messages": [*messages, await think(messages)]}

    async def ainvoke(graph: Any, payload: Any) -> Any:
        return await graph.ainvoke(payload, {"configurable": {"thread_id": uuid4().hex}})

    return Built(graph=agent, payload="a room", tools=["book"], mode="async", ainvoke=ainvoke, expect=answered())


def async_parallel(world: World) -> Built:
    """Async nodes; three tool calls in one reply, which wait for each other: they must be in flight together."""
    arrived = list[str]()

    @tool
    async def book(city: str) -> str:
        """Book a room."""
        arrived.append(city)
        async with asyncio.timeout(20):
            while len(arrived) % 3:
                await asyncio.sleep(0)
        return world.write("book", city)

    graph = react(world.scripted(per_reply=3), [book])
    return Built(graph=graph, payload=ask(), tools=["book"], mode="async", expect=answered(3))


def raw_thread(world: World) -> Built:
    """The node leaves everything to a thread that inherits no context."""
    book = toolbox(world)[0]

    def work(messages: list[AnyMessage], done: list[AnyMessage]) -> None:
        reply = world.model.bind_tools([book]).invoke(messages)
        results = [book.invoke(call) for call in reply.tool_calls]
        done += [reply, *results, world.model.invoke([*messages, reply, *results])]

    def node(state: MessagesState) -> dict[str, Any]:
        done = list[AnyMessage]()
        thread = threading.Thread(target=work, args=(state["messages"], done))
        thread.start()
        thread.join()
        return {"messages": done}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
    return Built(graph=graph, payload=ask(), tools=["book"], expect=answered())


def thread_pool(world: World) -> Built:
    """Three model calls and their tools, by submit and by map, in a pool of the user's that outlives the run."""
    book = toolbox(world)[0]
    pool = ThreadPoolExecutor(2)

    def node(state: MessagesState) -> dict[str, Any]:
        bound = world.model.bind_tools([book])
        replies = [future.result() for future in [pool.submit(bound.invoke, state["messages"]) for _ in range(3)]]
        calls = [call for reply in replies for call in reply.tool_calls]
        results = list(pool.map(book.invoke, calls))
        return {"messages": [*replies, *results, world.model.invoke("sum up")]}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
    return Built(graph=graph, payload=ask(), tools=["book"], expect=answered(3))


def in_threads_async(world: World) -> Built:
    """An async node that hands its sync work to threads."""
    book = toolbox(world)[0]

    async def node(state: MessagesState) -> dict[str, Any]:
        loop, bound = asyncio.get_running_loop(), world.model.bind_tools([book])
        reply = await asyncio.to_thread(bound.invoke, state["messages"])
        results = await asyncio.gather(
            *(loop.run_in_executor(executor=None, func=partial(book.invoke, call)) for call in reply.tool_calls)
        )
        last = await asyncio.create_task(bound.ainvoke([*state["messages"], reply, *results]))
        return {"messages": [reply, *results, last]}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
    return Built(graph=graph, payload=ask(), tools=["book"], mode="async", expect=answered())


def memory_and_store(world: World) -> Built:
    """A checkpointer in memory and a store that a node reads: two turns on one thread."""
    store = InMemoryStore()
    store.put(("user",), "name", {"name": "Ada"})
    book = toolbox(world)[0]
    inner = react(world.model, [book])

    def greet(state: MessagesState, runtime: Runtime) -> dict[str, Any]:
        return {"messages": [("system", f"The user is {runtime.store.get(('user',), 'name').value['name']}.")]}

    graph = StateGraph(MessagesState).add_node("greet", greet).add_node("agent", inner)
    compiled = graph.add_edge(START, "greet").add_edge("greet", "agent").compile(checkpointer=InMemorySaver(), store=store)

    def invoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        graph.invoke(payload, config)
        return graph.invoke(ask("and another"), config)

    async def ainvoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        await graph.ainvoke(payload, config)
        return await graph.ainvoke(ask("and another"), config)

    def expect(result: Any) -> None:
        answered(2)(result)
        assert [message.text for message in result["messages"] if message.type == "system"] == ["The user is Ada."] * 2

    return Built(graph=compiled, payload=ask(), tools=["book"], invoke=invoke, ainvoke=ainvoke, expect=expect)


def sqlite_checkpoints(world: World) -> Built:
    """Checkpoints in a file that is opened before the run."""
    saver = SqliteSaver(sqlite3.connect(world.folder / "checkpoints.db", check_same_thread=False))
    graph = react(world.model, [toolbox(world)[0]], checkpointer=saver)

    def invoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        graph.invoke(payload, config)
        return graph.get_state(config).values

    return Built(graph=graph, payload=ask(), tools=["book"], mode="sync", invoke=invoke, expect=answered())


KINDS = kinds(
    functional_api,
    functional_api_async,
    async_parallel,
    raw_thread,
    thread_pool,
    in_threads_async,
    memory_and_store,
    sqlite_checkpoints,
)
