"""Dreams and real runs of the same agents at once, in threads and in tasks: each has its own policy and world."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from worlds import TASK, Answers
from zoo import KINDS, Built, World, signed
from zoo.policy import policy_for

from dreamgym_lg.simulate import simulated

IN_THREADS = ("closures", "pool_of_multiprocessing", "thread_with_a_loop", "calls_of_one_id")
IN_TASKS = ("langchain_agent", "anyio_threads", "supervisor_package")

Agents = list[tuple[World, Built]]


def agents(names: tuple[str, ...], folder: Path) -> Agents:
    worlds = [(World(folder=folder / kind.name), kind) for kind in KINDS if kind.name in names]
    return [(world, kind.build(world)) for world, kind in worlds]


def _check(result: Any, label: str, labels: list[str]) -> None:
    assert [each for each in (*labels, "production") if signed(result, each)] == [label], (label, result)


def _episode(made: Agents, number: int, labels: list[str]) -> tuple[Built, Any]:
    world, built = made[number % len(made)]
    environment = Answers(label=f"{labels[number]}'s")
    policy = policy_for(world, labels[number])
    return built, simulated(built.graph, policy=policy, environment=environment, task=TASK, pass_through=built.passthrough)


def _check_episode(episode: Any, result: Any, label: str, labels: list[str]) -> None:
    _check(result, label, labels)
    assert episode.steps and all(step.next_observation.startswith(f"{label}'s ") for step in episode.steps)


def in_threads(made: Agents, labels: list[str], real: int) -> None:
    def dream(number: int) -> None:
        built, episode = _episode(made, number, labels)
        with episode:
            result = built.invoke(built.graph, built.payload)
        _check_episode(episode, result, labels[number], labels)

    def produce(number: int) -> None:
        _, built = made[number % len(made)]
        _check(built.invoke(built.graph, built.payload), "production", labels)

    with ThreadPoolExecutor(len(labels) + real) as pool:
        jobs = [pool.submit(dream, number) for number in range(len(labels))]
        jobs += [pool.submit(produce, number) for number in range(real)]
        for job in jobs:
            job.result(60)


async def in_tasks(made: Agents, labels: list[str], real: int) -> None:
    async def dream(number: int) -> None:
        built, episode = _episode(made, number, labels)
        async with episode:
            result = await built.ainvoke(built.graph, built.payload)
        _check_episode(episode, result, labels[number], labels)

    async def produce(number: int) -> None:
        _, built = made[number % len(made)]
        _check(await built.ainvoke(built.graph, built.payload), "production", labels)

    await asyncio.gather(*map(dream, range(len(labels))), *map(produce, range(real)))


def crowd(folder: Path, name: str, dreams: int, real: int) -> None:
    """Half of them in threads, half in tasks of a loop, all at once. Raises AssertionError where one saw another."""
    labels = [f"{name}{number:02}" for number in range(dreams)]
    threads, tasks = agents(IN_THREADS, folder / "threads"), agents(IN_TASKS, folder / "tasks")
    assert (len(threads), len(tasks)) == (len(IN_THREADS), len(IN_TASKS))
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(in_threads, threads, labels[: dreams // 2], real // 2)
        asyncio.run(in_tasks(tasks, labels[dreams // 2 :], real - real // 2))
        beside.result(60)
    for made, share in ((threads, real // 2), (tasks, real - real // 2)):
        for place, (world, built) in enumerate(made):
            runs = len(range(place, share, len(made)))
            assert sorted(name for name, _ in world.effects) == sorted([*built.tools] * runs), (world.folder, world.effects)
            assert len(world.disk()) == len(world.effects)
            assert bool(world.model_calls) == bool(runs)
