"""Work that a node hands to others: threads, other loops, pools and contexts."""

import asyncio
import contextvars
import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import anyio
from langchain_core.messages import AnyMessage
from langchain_core.runnables.config import ContextThreadPoolExecutor
from langgraph.graph import MessagesState

from zoo.base import Built, World, answered, ask, kinds, react, single, toolbox

Work = Callable[[], Any]

_KEPT: list[Any] = []
"""Pools: one that is collected complains."""


def _hands_over(world: World, hand_over: Callable[[Work], Any]) -> Built:
    """An agent that leaves each call of its model and of its tool to another."""
    book = toolbox(world)[0]

    def node(state: MessagesState) -> dict[str, Any]:
        reply = hand_over(lambda: world.model.bind_tools([book]).invoke(state["messages"]))
        results = [hand_over(lambda call=call: book.invoke(call)) for call in reply.tool_calls]
        return {"messages": [reply, *results, hand_over(lambda: world.model.invoke([*state["messages"], reply, *results]))]}

    return Built(graph=single(node), payload=ask(), tools=["book"], expect=answered())


def pool_of_multiprocessing(world: World) -> Built:
    """A pool of threads that the first work makes."""
    made = functools.cache(lambda: ThreadPool(1))
    _KEPT.append(made)
    return _hands_over(world, lambda work: made().apply_async(work).get(20))


def pool_that_copies_contexts(world: World) -> Built:
    """LangChain's pool, made for each call, and the pool's own way to keep what is around."""

    def hand_over(work: Work) -> Any:
        with ContextThreadPoolExecutor(1) as pool:
            return pool.submit(work).result(20)

    return _hands_over(world, hand_over)


def context_given_by_hand(world: World) -> Built:
    """A pool of production's that has served it before, and is given the context with each work."""
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    return _hands_over(world, lambda work: pool.submit(contextvars.copy_context().run, work).result(20))


def timer(world: World) -> Built:
    """Each call comes a moment later."""

    def hand_over(work: Work) -> Any:
        done: Future[Any] = Future()
        threading.Timer(0.001, lambda: done.set_result(work())).start()
        return done.result(20)

    return _hands_over(world, hand_over)


def thread_with_a_loop(world: World) -> Built:
    """Sync nodes that ask an async client, whose loop runs for ever in a thread, born with the first call."""
    loop = asyncio.new_event_loop()
    thread, birth = threading.Thread(target=loop.run_forever, daemon=True), threading.Lock()
    book = toolbox(world)[0]

    def wait(made: Any) -> Any:
        with birth:
            if not thread.ident:
                thread.start()
        return asyncio.run_coroutine_threadsafe(made, loop).result(20)

    def node(state: MessagesState) -> dict[str, Any]:
        reply = wait(world.model.bind_tools([book]).ainvoke(state["messages"]))
        results = [wait(book.ainvoke(call)) for call in reply.tool_calls]
        return {"messages": [reply, *results, wait(world.model.ainvoke([*state["messages"], reply, *results]))]}

    return Built(graph=single(node), payload=ask(), tools=["book"], expect=answered())


def loop_of_its_own(world: World) -> Built:
    """A sync node that runs async code to its end, by asyncio.run."""
    book = toolbox(world)[0]

    async def work(messages: list[AnyMessage]) -> list[AnyMessage]:
        reply = await world.model.bind_tools([book]).ainvoke(messages)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(book.ainvoke(call)) for call in reply.tool_calls]
        return [reply, *(task.result() for task in tasks), await world.model.ainvoke("sum up")]

    graph = single(lambda state: {"messages": asyncio.run(work(state["messages"]))}, schema=MessagesState)
    return Built(graph=graph, payload=ask(), tools=["book"], mode="sync", expect=answered())


def anyio_threads(world: World) -> Built:
    """Threads of anyio, which outlive the run, and a way back from them to the loop."""
    book = toolbox(world)[0]

    async def node(state: MessagesState) -> dict[str, Any]:
        bound = world.model.bind_tools([book])
        reply = await anyio.to_thread.run_sync(bound.invoke, state["messages"])
        back = functools.partial(anyio.from_thread.run, book.ainvoke)
        results = [await anyio.to_thread.run_sync(back, call) for call in reply.tool_calls]
        return {"messages": [reply, *results, await world.model.ainvoke([*state["messages"], reply, *results])]}

    return Built(graph=single(node), payload=ask(), tools=["book"], mode="async", expect=answered())


def stream_read_by_another(world: World) -> Built:
    """A thread reads the model's stream into a queue; the node takes the words from there."""
    book = toolbox(world)[0]

    def words(messages: Any) -> Any:
        read: queue.Queue[Any] = queue.Queue()
        bound = world.model.bind_tools([book])
        threading.Thread(target=lambda: [read.put(word) for word in [*bound.stream(messages), None]]).start()
        whole = list(iter(read.get, None))
        return sum(whole[1:], whole[0])

    def node(state: MessagesState) -> dict[str, Any]:
        reply = words(state["messages"])
        results = [book.invoke(call) for call in reply.tool_calls]
        return {"messages": [reply, *results, words([*state["messages"], reply, *results])]}

    return Built(graph=single(node), payload=ask(), tools=["book"], expect=answered())


def made_with_the_first_call(world: World) -> Built:
    """Model, tools and inner graph are made lazily, once for the process and once for each thread."""
    local = threading.local()
    made = functools.cache(lambda: react(world.model, [toolbox(world)[0]]))

    def node(state: MessagesState) -> dict[str, Any]:
        local.model = getattr(local, "model", None) or world.production()
        return {"messages": [*made().invoke(state)["messages"][1:-1], local.model.invoke("sum up")]}

    return Built(graph=single(node), payload=ask(), tools=["book"], mode="sync", expect=answered())


KINDS = kinds(
    pool_of_multiprocessing,
    pool_that_copies_contexts,
    context_given_by_hand,
    timer,
    thread_with_a_loop,
    loop_of_its_own,
    anyio_threads,
    stream_read_by_another,
    made_with_the_first_call,
)
