"""Episodes beside each other, inside of each other, and beside production: none sees another."""

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crowd import crowd
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from worlds import TASK, Answers, played
from zoo import KINDS, Built, World, signed, view
from zoo.base import ask, react, toolbox
from zoo.policy import ScriptedPolicy, policy_for

from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent, simulated
from dreamgym_lg.simulate.context import guarded_episode

ASYNC = ("react_agent", "send_fan_out", "streams_model", "langchain_agent", "in_threads_async", "supervisor", "async_only")
SYNC = ("closures", "thread_pool", "raw_thread", "functional_api", "supervisor_sync", "batches_model", "structured_output")


def built(names: tuple[str, ...], folder: Path) -> list[tuple[World, Built]]:
    made = []
    for kind in KINDS:
        if kind.name in names:
            world = World(folder=folder / kind.name)
            made.append((world, kind.build(world)))
    assert len(made) == len(names)
    return made


def check(result: Any, label: str, others: list[str]) -> None:
    assert signed(result, label) and not any(signed(result, other) for other in others), view(result)


async def test_concurrent_async_episodes_and_production_do_not_mix(tmp_path: Path) -> None:
    agents = built(ASYNC, tmp_path)
    labels = [f"policy{number:02}" for number in range(40)]

    async def dream(number: int) -> None:
        world, agent = agents[number % len(agents)]
        policy, environment = policy_for(world, labels[number]), Answers(label=f"world{number:02}")
        options: Any = {"pass_through": agent.passthrough, "recursion_limit": 50}
        async with simulated(agent.graph, policy=policy, environment=environment, task=TASK, **options) as episode:
            result = await agent.ainvoke(agent.graph, agent.payload)
        check(result, labels[number], ["production", *(other for other in labels if other != labels[number])])
        assert policy.calls == len(episode.calls) and len(environment.actions) == len(episode.steps)
        assert all(step.next_observation.startswith(f"world{number:02} ") for step in episode.steps)

    async def produce(number: int) -> None:
        _, agent = agents[number % len(agents)]
        for _ in range(3):
            result = await agent.ainvoke(agent.graph, agent.payload)
            check(result, "production", labels)
            agent.expect(result)

    await asyncio.gather(*(job for n in range(40) for job in ((dream(n), produce(n)) if n < 7 else (dream(n),))))
    assert all(world.effects for world, agent in agents if agent.tools)


def test_threaded_episodes_and_production_do_not_mix(tmp_path: Path) -> None:
    agents = built(SYNC, tmp_path)
    labels = [f"policy{number:02}" for number in range(16)]
    start = threading.Barrier(16 + len(agents))

    def dream(number: int) -> None:
        world, agent = agents[number % len(agents)]
        policy, environment = policy_for(world, labels[number]), Answers(label=f"world{number:02}")
        start.wait()
        with simulated(
            agent.graph, policy=policy, environment=environment, task=TASK, pass_through=agent.passthrough
        ) as episode:
            result = agent.invoke(agent.graph, agent.payload)
        check(result, labels[number], ["production", *(other for other in labels if other != labels[number])])
        assert all(step.next_observation.startswith(f"world{number:02} ") for step in episode.steps)

    def produce(number: int) -> None:
        _, agent = agents[number]
        start.wait()
        for _ in range(3):
            result = agent.invoke(agent.graph, agent.payload)
            check(result, "production", labels)
            agent.expect(result)

    with ThreadPoolExecutor(16 + len(agents)) as pool:
        futures = [pool.submit(dream, number) for number in range(16)]
        futures += [pool.submit(produce, number) for number in range(len(agents))]
        for future in futures:
            future.result()


def test_a_shared_pool_keeps_nothing_of_an_episode(tmp_path: Path) -> None:
    """Its worker is born in the episode and works for production afterwards; one born before works for the episode."""
    world = World(folder=tmp_path)
    book = toolbox(world)[0]
    for born_before in (False, True):
        with ThreadPoolExecutor(1) as pool:
            if born_before:
                pool.submit(int).result()

            def node(state: MessagesState, pool: ThreadPoolExecutor = pool) -> dict[str, Any]:
                reply = pool.submit(world.model.bind_tools([book]).invoke, state["messages"]).result()
                return {"messages": [reply, *pool.map(book.invoke, reply.tool_calls)]}

            graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
            effects = len(world.effects)
            with simulated(graph, policy=ScriptedPolicy(), environment=Answers(), task=TASK) as episode:
                inside = pool.submit(guarded_episode).result()
                check(episode.invoke(ask()), "policy", ["production"])
            assert inside is episode and len(world.effects) == effects
            assert pool.submit(guarded_episode).result() is None
            check(graph.invoke(ask()), "production", ["policy"])
            assert len(world.effects) == effects + 1


def test_a_thread_that_outlives_its_episode_still_belongs_to_it(tmp_path: Path) -> None:
    """Nothing of the dream may reach the world late."""
    goes_on = threading.Event()
    seen = list[Any]()

    def late() -> None:
        goes_on.wait(10)
        try:
            (tmp_path / "late").write_text("harm")
        except BaseException as error:
            seen.append(error)

    with simulated(None, policy=ScriptedPolicy(), environment=Answers()) as episode:
        thread = threading.Thread(target=late)
        thread.start()
    goes_on.set()
    thread.join()
    assert not (tmp_path / "late").exists() and seen[0].blocked == (episode.blocked[0],)


def outer_graph(run: Callable[[], Any], saver: InMemorySaver) -> Any:
    """A training graph in which one node plays episodes."""

    async def node(state: dict) -> dict[str, Any]:
        return {"result": await run()}

    return StateGraph(dict).add_node("train", node).add_edge(START, "train").compile(checkpointer=saver)


@pytest.mark.parametrize("fresh", [True, False], ids=["by rollout", "by hand"])
async def test_an_episode_inside_of_a_node_is_no_subgraph_of_it(fresh: bool, tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    inner = react(world.model, [toolbox(world)[0]], checkpointer=InMemorySaver())
    agent = SimulatedAgent(inner, ScriptedPolicy())

    async def by_rollout() -> Any:
        worlds: Any = lambda: Answers()  # noqa: E731
        (episode,) = await rollout(agent, [TASK], worlds, source="synthetic")
        assert episode.error is None
        return [step.action for step in episode.steps], episode.success

    async def by_hand() -> Any:
        found = await played(agent, Answers())
        return [step.action for step in found["steps"]], found["success"]

    saver = InMemorySaver()
    outer = outer_graph(by_rollout if fresh else by_hand, saver)
    config: Any = {"configurable": {"thread_id": "training"}}
    chunks = [chunk async for chunk in outer.astream({"result": None}, config, stream_mode="updates", subgraphs=True)]
    (actions, success) = chunks[-1][1]["train"]["result"]
    assert success and ['"name": "book"' in action for action in actions] == [True, False]
    assert [namespace for namespace, _ in chunks] == [()], "the episode's chunks are in the outer stream"
    assert {config["configurable"]["checkpoint_ns"] for config, *_ in saver.list(None)} == {""}
    assert list(inner.checkpointer.list(None)) == [] and world.effects == [] and world.model_calls == 0
    assert guarded_episode() is None


async def test_production_inside_of_an_episodes_world_is_production(tmp_path: Path) -> None:
    """An environment that is made of a real agent: neither its model nor its tools are the dream's."""
    world, theirs = World(folder=tmp_path / "dreamed"), World(folder=tmp_path / "real")
    backend = react(theirs.model, [toolbox(theirs)[1]], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "backend"}}

    class Backed(Answers):
        async def astep(self, action: str) -> Any:
            check(await backend.ainvoke(ask("a backend"), config), "production", ["policy"])
            return super().step(action)

        def step(self, action: str) -> Any:
            check(backend.invoke(ask("a backend"), config), "production", ["policy"])
            return super().step(action)

    graph = react(world.model, [toolbox(world)[0]])
    async with simulated(graph, policy=ScriptedPolicy(), environment=Backed(), task=TASK) as episode:
        chunks = [chunk async for chunk in graph.astream(ask(), stream_mode=["messages", "updates"], subgraphs=True)]
        assert not signed(chunks, "production"), "the world's words are in the dreamed graph's stream"
        check(episode.invoke(ask()), "policy", ["production"])
    assert len(episode.steps) == 2 and len(theirs.effects) == 2 and world.effects == []
    assert len(list(backend.checkpointer.list(config))) > 6, "the backend keeps its own checkpoints"


async def test_episodes_do_not_wait_for_each_others_threads(tmp_path: Path) -> None:
    """Sync nodes run in the loop's executor, which is small; sync tools are answered on the loop."""
    together, threads = threading.Barrier(60, timeout=30), set[int]()

    def node(state: MessagesState) -> dict[str, Any]:
        together.wait()
        return {}

    class Noting(Answers):
        async def astep(self, action: str) -> Any:
            threads.add(threading.get_ident())
            return super().step(action)

        def step(self, action: str) -> Any:
            raise AssertionError("asked in a thread")

    world = World(folder=tmp_path)
    graph = StateGraph(MessagesState).add_node("node", node).add_node("agent", react(world.model, [toolbox(world)[0]]))
    compiled = graph.add_edge(START, "node").add_edge("node", "agent").compile()
    agent = SimulatedAgent(compiled, ScriptedPolicy())
    results = await asyncio.gather(*(played(agent, Noting()) for _ in range(60)))
    assert all(result["success"] for result in results) and threads == {threading.get_ident()}


@pytest.mark.slow
def test_64_dreams_beside_32_real_runs_do_not_mix(tmp_path: Path) -> None:
    """In threads, in tasks, and in two processes: every effect is a real run's, and every word is one's own."""
    other = multiprocessing.get_context("spawn").Process(target=crowd, args=(tmp_path / "other", "other", 24, 12))
    other.start()
    crowd(tmp_path / "here", "policy", 40, 20)
    other.join(60)
    assert other.exitcode == 0
