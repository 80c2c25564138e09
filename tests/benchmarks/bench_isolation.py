"""What isolation="process" costs and gives: a worker's start, an episode in a warm worker against one in process, two cores.

Overhead: an agent of instant models and tools, one episode after the other, in process and in a warm worker in turns; the
median of the pairs' differences. Throughput: an agent whose nodes compute, eight episodes at once, with one and two workers.

Run: python tests/benchmarks/bench_isolation.py [result.json]
"""

import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench_simulate import SYNC, Instant, World
from langgraph.graph import START, MessagesState, StateGraph

from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent
from dreamgym_lg.simulate.wall.agent import WalledAgent, Workers
from dreamgym_lg.types import StepResult, Task

PAIRS, EPISODES, ROUNDS = 60, 48, 3
TARGET_OVERHEAD_MS, TARGET_CORES = 5.0, 1.7


class Dream(World):
    """Judges as well: the final answer is a success."""

    def step(self, action: str) -> StepResult:
        return StepResult("counted", 1.0, '"answer"' in action, False, {"success": True})


def compute(state: MessagesState) -> dict[str, Any]:
    """Some tenth of a second of one core."""
    sum(number * number for number in range(2_000_000))
    return {"messages": [Instant().invoke(state["messages"])] * 9}


computing = StateGraph(MessagesState).add_node("compute", compute).add_edge(START, "compute").compile()
quick = SYNC


async def seconds(agent: Any, episodes: int = 1) -> float:
    tasks = [Task(id=f"t{number}", instruction="count", environment="bench") for number in range(episodes)]
    start = time.perf_counter()
    played = await rollout(agent, tasks, Dream, source="synthetic", concurrency=8)
    assert all(each.error is None and each.success for each in played), played[0].error
    return time.perf_counter() - start


async def overhead() -> dict[str, float]:
    workers = Workers(f"{__file__}:quick")
    workers._count = 1  # one of them, on the core that it has by default
    walled, here = WalledAgent(workers, Instant()), SimulatedAgent(quick, Instant())
    started = await seconds(walled)
    pairs = [(await seconds(here), await seconds(walled)) for _ in range(PAIRS + 10)][10:]
    at_once = [
        (await seconds(here, EPISODES) / EPISODES, await seconds(walled, EPISODES) / EPISODES) for _ in range(ROUNDS * 2)
    ]
    workers.close()
    return {
        "start_s": started,
        "in_process_ms": 1000 * statistics.median(here for here, _ in pairs),
        "in_worker_ms": 1000 * statistics.median(there for _, there in pairs),
        "overhead_ms": 1000 * statistics.median(there - here for here, there in pairs),
        "eight_at_once_in_process_ms": 1000 * statistics.median(here for here, _ in at_once),
        "eight_at_once_overhead_ms": 1000 * statistics.median(there - here for here, there in at_once),
        "least_overhead_ms": 1000 * (min(there for _, there in pairs) - min(here for here, _ in pairs)),
    }


async def throughput() -> dict[str, float]:
    agents = {}
    for count in (1, 2):
        workers = Workers(f"{__file__}:computing", count=count)
        agents[count] = WalledAgent(workers, Instant())
        await seconds(agents[count], 2 * count)  # warm
    rounds = [{count: EPISODES / await seconds(agent, EPISODES) for count, agent in agents.items()} for _ in range(ROUNDS)]
    best = {count: max(each[count] for each in rounds) for count in agents}
    return {"one_worker_per_s": best[1], "two_workers_per_s": best[2], "gain": best[2] / best[1]}


def main() -> None:
    print(f"{os.cpu_count()} cores, load before: {os.getloadavg()[0]:.1f}")
    found = asyncio.run(overhead()) | asyncio.run(throughput()) | {"load": os.getloadavg()[0]}
    for name, value in found.items():
        print(f"{name:>20} {value:8.2f}")
    print(f"targets: overhead at most {TARGET_OVERHEAD_MS} ms, gain at least {TARGET_CORES}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
