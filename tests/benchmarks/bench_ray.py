"""What Ray actors give and cost on this machine: an agent that computes on one and two actors; a call of the policy and a step.

Throughput: an agent whose node computes some tenth of a second of one core, eight episodes at once; the best of three rounds.
Overhead: an episode graph of instant policy and environment, ten steps, sixteen episodes at once, in process and in one actor.

Run: python tests/benchmarks/bench_ray.py [result.json]
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import START, StateGraph

from dreamgym_lg.environment import Environment
from dreamgym_lg.experiment.world import World
from dreamgym_lg.graphs.episode import EpisodeState
from dreamgym_lg.integrations.ray.rollouts import RayRollouts
from dreamgym_lg.rollout import Agent, rollout
from dreamgym_lg.types import Split, Step, StepResult, Task

EPISODES, ROUNDS, STEPS = 48, 3, 10
TARGET_ACTORS = 1.7


class Instant(BaseChatModel):
    @property
    def _llm_type(self) -> str:
        return "instant"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("go on"))])

    async def _agenerate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return self._generate(messages)


class Steps(Environment):
    def reset(self, task: Task) -> str:
        self._left = STEPS
        return "begin"

    def step(self, action: str) -> StepResult:
        self._left -= 1
        return StepResult("go on", 0.0, not self._left, False, {"success": not self._left})

    async def areset(self, task: Task) -> str:
        return self.reset(task)

    async def astep(self, action: str) -> StepResult:
        return self.step(action)


class StepsWorld(World):
    name = "steps"

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> Sequence[Task]:
        return []

    def create_environment(self) -> Environment:
        return Steps()


class ComputingWorld(StepsWorld):
    """Its agent asks the policy once, and computes."""

    name = "computing"

    def agent(self, policy: BaseChatModel, *, real: bool) -> Agent:
        def compute(state: EpisodeState) -> dict[str, Any]:
            sum(number * number for number in range(2_000_000))
            reply = policy.invoke("compute").text
            return {"steps": [Step(observation="", action=reply, next_observation="", terminated=True)], "success": True}

        return StateGraph(EpisodeState).add_node("compute", compute).add_edge(START, "compute").compile()


def seconds(world: World, agent: Agent, *, episodes: int, concurrency: int, here: bool = False) -> float:
    tasks = [Task(id=f"t{number}", instruction="go on", environment=world.name) for number in range(episodes)]
    create = world.create_environment if here else None
    start = time.perf_counter()
    played = asyncio.run(rollout(agent, tasks, create, source="real", concurrency=concurrency))
    assert all(each.error is None and each.success for each in played), played[0].error
    return time.perf_counter() - start


def throughput() -> dict[str, float]:
    world, agents = ComputingWorld(), {}
    for count in (1, 2):
        agents[count] = RayRollouts(ComputingWorld, num_actors=count, num_cpus=0.5).agent(world, Instant(), real=True)
        seconds(world, agents[count], episodes=2 * count, concurrency=8)  # starts them
    given = {"episodes": EPISODES, "concurrency": 8}
    rounds = [{count: EPISODES / seconds(world, agent, **given) for count, agent in agents.items()} for _ in range(ROUNDS)]
    best = {count: max(each[count] for each in rounds) for count in agents}
    return {"one_actor_per_s": best[1], "two_actors_per_s": best[2], "gain": best[2] / best[1]}


def overhead() -> dict[str, float]:
    world, rollouts = StepsWorld(), RayRollouts(StepsWorld, num_actors=1, num_cpus=0.5)
    start = time.perf_counter()
    seconds(world, there := rollouts.agent(world, Instant(), real=True), episodes=1, concurrency=1)
    started, here, given = time.perf_counter() - start, world.agent(Instant(), real=True), {"episodes": 64, "concurrency": 16}
    in_process = min(seconds(world, here, here=True, **given) for _ in range(ROUNDS))
    in_actor = min(seconds(world, there, **given) for _ in range(ROUNDS))
    alone = min(seconds(world, there, episodes=4, concurrency=1) for _ in range(ROUNDS))
    return {
        "start_s": started,
        "in_process_ms_a_step": 1000 * in_process / 64 / STEPS,
        "in_actor_ms_a_step": 1000 * in_actor / 64 / STEPS,
        "one_at_a_time_ms_a_step": 1000 * alone / 4 / STEPS,
    }


def main() -> None:
    print(f"{os.cpu_count()} cores, load before: {os.getloadavg()[0]:.1f}")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    found = overhead() | throughput() | {"load": os.getloadavg()[0]}
    for name, value in found.items():
        print(f"{name:>24} {value:8.2f}")
    print(f"target: gain at least {TARGET_ACTORS}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
