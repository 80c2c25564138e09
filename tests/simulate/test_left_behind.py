"""What an episode's code has started and what outlives it: a worker serves whoever gave it the work, or says that it cannot."""

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
from worlds import TASK, Answers
from zoo import World, signed
from zoo.base import ask, toolbox
from zoo.policy import ScriptedPolicy

from dreamgym_lg.errors import OwnerUnknown
from dreamgym_lg.simulate import RealAccessBlocked, simulated

Work = Callable[[], Any]


class QueueWorker:
    """One thread, born with the first work, that does what a queue brings: as clients of rate-limited services have."""

    def __init__(self, jobs: Any) -> None:
        self.jobs, self.thread = jobs, None

    def __call__(self, work: Work) -> Any:
        if self.thread is None:
            self.thread = threading.Thread(target=self.serve, daemon=True, name="the-worker")
            self.thread.start()
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


def dreamed(graph: Any, label: str) -> Any:
    with simulated(graph, policy=ScriptedPolicy(label=label), environment=Answers(label=label), task=TASK) as episode:
        state = episode.invoke(ask())
    assert all(step.next_observation.startswith(label) for step in episode.steps) and episode.steps
    return state


@pytest.mark.parametrize("make", [lambda: QueueWorker(queue.Queue()), PoolWorker], ids=["queue", "ThreadPool"])
def test_a_worker_born_in_an_episode_serves_whoever_gives_it_work(make: Any, tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph = agent(world, make())
    for number in range(2):
        state = dreamed(graph, f"policy{number}")
        assert signed(state, f"policy{number}") and len(world.effects) == number * (3 if make is PoolWorker else 1)
        state = graph.invoke(ask())
        assert signed(state, "production") and not signed(state, "policy0") and not signed(state, "policy1")
    assert world.effects and "book wrote" in state["messages"][-1].text


def test_a_worker_serves_production_and_other_episodes_while_its_own_goes_on(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph = agent(world, QueueWorker(queue.Queue()))
    started, results = threading.Event(), list[Any]()

    def beside() -> None:
        started.wait(20)
        results.extend([graph.invoke(ask()), dreamed(graph, "second"), graph.invoke(ask())])

    other = threading.Thread(target=beside)
    other.start()
    with simulated(graph, policy=ScriptedPolicy(label="first"), environment=Answers(), task=TASK) as episode:
        assert signed(episode.invoke(ask()), "first")
        started.set()
        other.join()
        assert signed(episode.invoke(ask()), "first")
    assert [signed(result, "production") for result in results] == [True, False, True] and signed(results[1], "second")
    assert len(world.effects) == 2 and len(episode.steps) == 2


def test_a_worker_of_production_is_lent_to_the_episode_whose_node_gives_it_work(tmp_path: Path) -> None:
    """It answers for that episode's policy and world, and is production's again when the episode has ended."""
    world = World(folder=tmp_path)
    worker = QueueWorker(queue.Queue())
    assert worker(int) == 0
    graph = agent(world, worker)
    assert signed(dreamed(graph, "policy0"), "policy0") and world.effects == []
    assert signed(graph.invoke(ask()), "production") and len(world.effects) == 1
    assert signed(dreamed(graph, "policy1"), "policy1") and len(world.effects) == 1
    assert world.model.invoke("beside").text.startswith("production")
    worker.jobs.put((lambda: (tmp_path / "late").touch(), done := Future[Any]()))
    done.result(20)
    assert (tmp_path / "late").exists()


def test_who_reads_what_a_driver_has_put_is_not_lent(tmp_path: Path) -> None:
    """Results of an episode, put there around its run and not by a node: a judge that reads them asks its own model."""
    world, results, judged = World(folder=tmp_path), queue.Queue[Any](), list[str]()
    judge = threading.Thread(target=lambda: judged.append(world.model.invoke(str(results.get())).text))
    judge.start()
    graph = agent(world, lambda work: work())
    with simulated(graph, policy=ScriptedPolicy(), environment=Answers(), task=TASK) as episode:
        results.put(len(episode.invoke(ask())["messages"]))
        judge.join(20)
    assert judged[0].startswith("production")


def test_a_worker_whose_giver_is_unknown_answers_nobody_after_its_episode(tmp_path: Path) -> None:
    """A C queue tells nobody who put what: production gets an error that names the thread, never the old policy's answer."""
    world = World(folder=tmp_path)
    graph = agent(world, QueueWorker(queue.SimpleQueue()))
    assert signed(dreamed(graph, "policy"), "policy")
    for _ in range(2):
        with pytest.raises(OwnerUnknown, match=r"the-worker.*test_left_behind.py:\d+ in __call__.*anew in every run"):
            graph.invoke(ask())
    with pytest.raises(OwnerUnknown), simulated(graph, policy=ScriptedPolicy(), environment=Answers(), task=TASK) as episode:
        episode.invoke(ask())
    assert world.effects == [] and world.model_calls == 0


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


def test_what_an_episode_left_in_a_queue_is_not_done_for_real(tmp_path: Path) -> None:
    """The rest of a dead episode's work is no work of production's."""
    world = World(folder=tmp_path)
    worker, may_go = QueueWorker(queue.Queue()), threading.Event()
    book = toolbox(world)[0]
    late = Future[Any]()

    def node(state: dict) -> dict[str, Any]:
        worker(int)
        worker.jobs.put((lambda: may_go.wait(20), Future()))
        worker.jobs.put((lambda: book.invoke({"city": "Rome", "nights": 1}), late))
        return {}

    graph = StateGraph(dict).add_node("node", node).add_edge(START, "node").compile()
    with simulated(graph, policy=ScriptedPolicy(), environment=Answers(), task=TASK) as episode:
        episode.invoke({"found": None})
    may_go.set()
    with pytest.raises(OwnerUnknown):
        late.result(20)
    assert "book wrote" in worker(lambda: book.invoke({"city": "Bonn", "nights": 1}))
    assert [detail for _, detail in world.effects] == ["Bonn 1"]


# --- tasks --------------------------------------------------------------------------------------------------------------------


class Batcher:
    """A task, born with the first call, that asks the model for all that came within a moment; or one task for each."""

    def __init__(self, model: Any, *, most: int, apart: bool = False) -> None:
        self.model, self.most, self.apart = model, most, apart
        self.jobs: asyncio.Queue[Any] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def __call__(self, text: str) -> Any:
        if self.task is None:
            self.task = asyncio.create_task(self.serve())
        done = asyncio.get_running_loop().create_future()
        await self.jobs.put((text, done))
        return await done

    async def serve(self) -> None:
        while True:
            batch = [await self.jobs.get()]
            try:
                while len(batch) < self.most:
                    batch.append(await asyncio.wait_for(self.jobs.get(), 0.05))
            except TimeoutError:
                pass
            if self.apart:
                self.running = asyncio.create_task(self.answer(batch))
            else:
                await self.answer(batch)

    async def answer(self, batch: list[Any]) -> None:
        try:
            replies = await self.model.abatch([text for text, _ in batch])
        except Exception as error:
            replies = [error] * len(batch)
        for (_, done), reply in zip(batch, replies, strict=True):
            if isinstance(reply, Exception):
                done.set_exception(reply)
            else:
                done.set_result(reply)


def batched(batcher: Batcher) -> Any:
    async def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await batcher(state["messages"][-1].text)]}

    return StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()


async def adreamed(graph: Any, label: str) -> Any:
    async with simulated(graph, policy=ScriptedPolicy(label=label), environment=Answers(), task=TASK) as episode:
        return await episode.ainvoke(ask())


@pytest.mark.parametrize("apart", [False, True], ids=["itself", "a task for each"])
async def test_a_task_born_in_an_episode_serves_whoever_gives_it_work(apart: bool, tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    batcher = Batcher(world.model, most=1, apart=apart)
    graph = batched(batcher)
    labels = ["policy0", "production", "policy1", "policy2", "production"]
    one_by_one = [await (graph.ainvoke(ask()) if each == "production" else adreamed(graph, each)) for each in labels]
    at_once = await asyncio.gather(
        *(graph.ainvoke(ask()) if each == "production" else adreamed(graph, each) for each in labels)
    )
    for results in (one_by_one, at_once):
        assert [[signed(result, label) for label in labels] for result in results] == [[a == b for b in labels] for a in labels]
    assert batcher.task is not None
    batcher.task.cancel()


async def test_a_batch_of_two_owners_is_refused(tmp_path: Path) -> None:
    """One call cannot be answered by two policies: it names the task and says what to do."""
    world = World(folder=tmp_path)
    batcher = Batcher(world.model, most=2)
    graph = batched(batcher)

    async def produced() -> Any:
        while batcher.task is None:
            await asyncio.sleep(0)
        return await graph.ainvoke(ask())

    results = await asyncio.gather(adreamed(graph, "policy"), produced(), return_exceptions=True)
    assert [type(result) for result in results] == [OwnerUnknown] * 2 and "task of Batcher.serve, started at" in str(results[1])
    assert "more than one" in str(results[1]) and world.model_calls == 0
    assert signed(await graph.ainvoke(ask()), "production") and signed(await adreamed(graph, "policy"), "policy")
    assert batcher.task is not None
    batcher.task.cancel()
