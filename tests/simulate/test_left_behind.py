"""What an episode's code has started and what outlives it: it answers nobody else, and workers of a queue are refused."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import START, MessagesState, StateGraph
from worlds import TASK, Answers, dreamed
from zoo import World, signed
from zoo.base import ask, toolbox
from zoo.policy import ScriptedPolicy

from dreamgym_lg.errors import OwnerUnknown
from dreamgym_lg.simulate import RealAccessBlocked, simulated

Work = Callable[[], Any]


class QueueWorker:
    """One thread, born with the first work, that does what a queue brings: as clients of rate-limited services have."""

    def __init__(self, make: Callable[[], Any] = queue.Queue) -> None:
        self.make, self.jobs = make, None

    def __call__(self, work: Work) -> Any:
        if self.jobs is None:
            self.jobs = self.make()
            threading.Thread(target=self.serve, daemon=True, name="the-worker").start()
        done: Future[Any] = Future()
        self.jobs.put((work, done))
        return done.result(20)

    def serve(self) -> None:
        while True:
            work, done = self.jobs.get()
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)


class PoolWorker:
    """A pool that the first work makes."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, work: Work) -> Any:
        self.pool = self.pool or ThreadPool(1)
        (first,) = self.pool.map(lambda _: work(), [None])
        return [first, self.pool.apply_async(work).get(20), *self.pool.imap(lambda _: work(), [None])][0]


def agent(world: World, hand_over: Callable[[Work], Any]) -> Any:
    """Its node leaves the model's call and the tool's to a worker."""
    book = toolbox(world)[0]

    def node(state: MessagesState) -> dict[str, Any]:
        reply = hand_over(lambda: world.model.bind_tools([book]).invoke(state["messages"]))
        return {"messages": [reply, *[hand_over(lambda c=call: book.invoke(c)) for call in reply.tool_calls]]}

    return StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()


def dreamed_by(graph: Any, label: str) -> Any:
    with simulated(graph, policy=ScriptedPolicy(label=label), environment=Answers(label=label), task=TASK) as episode:
        state = episode.invoke(ask())
    assert all(step.next_observation.startswith(label) for step in episode.steps) and episode.steps
    return state


def test_a_pool_born_in_an_episode_serves_whoever_gives_it_work(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph = agent(world, PoolWorker())
    for number in range(2):
        state = dreamed_by(graph, f"policy{number}")
        assert signed(state, f"policy{number}") and len(world.effects) == number * 3
        state = graph.invoke(ask())
        assert signed(state, "production") and not signed(state, "policy0") and not signed(state, "policy1")
    assert world.effects and "book wrote" in state["messages"][-1].text


def test_a_queue_worker_of_production_is_given_no_work_of_a_dream(tmp_path: Path) -> None:
    """Its model and tools are real."""
    world = World(folder=tmp_path)
    graph = agent(world, QueueWorker())
    assert signed(graph.invoke(ask()), "production") and len(world.effects) == 1
    with pytest.raises(OwnerUnknown, match=r"test_left_behind.py:\d+ in __call__ gives work to a queue of another run"):
        dreamed_by(graph, "policy")
    assert signed(graph.invoke(ask()), "production") and len(world.effects) == 2 and world.model_calls == 2


def test_a_queue_worker_of_an_episode_serves_no_other_run(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph = agent(world, QueueWorker())
    assert signed(dreamed_by(graph, "policy"), "policy")
    for run in (lambda: graph.invoke(ask()), lambda: dreamed_by(graph, "other")):
        with pytest.raises(OwnerUnknown, match="gives work to a queue of another run"):
            run()
    assert world.effects == [] and world.model_calls == 0


def test_a_worker_whose_giver_is_unknown_answers_nobody_after_its_episode(tmp_path: Path) -> None:
    """A C queue is not watched: production gets an error that names the thread, never the old policy's answer."""
    world = World(folder=tmp_path)
    graph = agent(world, QueueWorker(queue.SimpleQueue))
    assert signed(dreamed_by(graph, "policy"), "policy")
    for run in (lambda: graph.invoke(ask()), lambda: dreamed_by(graph, "other")):
        with pytest.raises(OwnerUnknown, match=r"the-worker.*after the episode .* has ended"):
            run()
    assert world.effects == [] and world.model_calls == 0


@pytest.mark.parametrize("make", [queue.Queue, asyncio.Queue])
def test_what_is_only_told_by_a_queue_is_no_work(make: Any) -> None:
    """Progress for a page, say."""
    events = make()
    assert dreamed(lambda: events.put_nowait({"step": 1, "text": "looking"})).blocked == []
    assert events.get_nowait() == {"step": 1, "text": "looking"}


async def test_a_batching_task_serves_the_run_that_made_it_alone(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    batcher: dict[str, Any] = {}

    async def serve() -> None:
        while True:
            text, done = await batcher["jobs"].get()
            try:
                done.set_result((await world.model.abatch([text]))[0])
            except Exception as error:
                done.set_exception(error)

    async def node(state: MessagesState) -> dict[str, Any]:
        if not batcher:
            batcher.update(jobs=asyncio.Queue(), task=asyncio.create_task(serve()))
        done = asyncio.get_running_loop().create_future()
        await batcher["jobs"].put((state["messages"][-1].text, done))
        return {"messages": [await done]}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()

    async def adreamed(label: str) -> Any:
        async with simulated(graph, policy=ScriptedPolicy(label=label), environment=Answers(), task=TASK) as episode:
            return await episode.ainvoke(ask())

    assert signed(await adreamed("policy"), "policy")
    for run in (adreamed("other"), graph.ainvoke(ask())):
        with pytest.raises(OwnerUnknown, match="in node gives work to a queue of another run"):
            await run
    batcher.pop("task").cancel()
    batcher.clear()
    assert signed(await graph.ainvoke(ask()), "production") and world.model_calls == 1
    batcher["task"].cancel()


def test_what_a_pool_calls_besides_work_is_guarded_too(tmp_path: Path) -> None:
    """An initialiser, a callback, and a thread that one of them starts."""
    stopped = list[str]()

    def write(name: str) -> None:
        try:
            (tmp_path / name).write_text("harm")
        except BaseException:
            stopped.append(name)

    def initialise() -> None:
        write("initialiser")
        thread = threading.Thread(target=write, args=("thread",))
        thread.start()
        thread.join()

    def node(state: dict) -> dict[str, Any]:
        called = threading.Event()
        with ThreadPool(1, initialise) as pool:
            pool.apply_async(int, callback=lambda _: (write("callback"), called.set()))
            called.wait(20)
        return {}

    graph = StateGraph(dict).add_node("node", node).add_edge(START, "node").compile()
    with pytest.raises(RealAccessBlocked), simulated(graph, policy=ScriptedPolicy(), environment=Answers()) as episode:
        episode.invoke({"found": None})
    assert sorted(stopped) == ["callback", "initialiser", "thread"] and list(tmp_path.iterdir()) == []
