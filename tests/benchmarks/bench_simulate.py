"""What simulation costs: an agent of instant models and tools, plain and in the dream.

Dormant is the same plain run with all classes patched but no episode active, against the classes as they were; both are
measured in turns in one process. The audit hook, which cannot be taken off again, is measured by itself. Times are this
process's CPU time, so that other work on the machine does not count.

Run: python tests/benchmarks/bench_simulate.py [result.json]
"""

import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from dreamgym_lg.environment import Environment
from dreamgym_lg.simulate import guard, simulated
from dreamgym_lg.simulate.simulated import install_episode
from dreamgym_lg.types import StepResult, Task

CALLS = 9
"""Of one run: five replies, four of which call the tool."""
ROUNDS = 60
"""Pairs of measurements."""
RUNS = 4
"""Runs of the agent in one measurement."""
TARGET_DORMANT, TARGET_ACTIVE = 0.01, 1.5
TASK = Task(id="t", instruction="count", environment="bench", observation="count")


class Instant(BaseChatModel):
    """Calls the tool four times, then says so."""

    cache: bool | None = False

    @property
    def _llm_type(self) -> str:
        return "instant"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=[{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}])

    def _generate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
        calls = [{"name": "count", "args": {"number": len(messages)}, "id": f"call_{len(messages)}"}]
        message = AIMessage("", tool_calls=calls) if len(messages) < CALLS else AIMessage("done")
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(self, messages: Any, *_: Any, **__: Any) -> ChatResult:
        return self._generate(messages)


@tool
def count(number: int) -> str:
    """Count."""
    return "counted"


@tool("count")
async def acount(number: int) -> str:
    """Count."""
    return "counted"


class World(Environment):
    def reset(self, task: Task) -> str:
        return task.instruction

    def step(self, action: str) -> StepResult:
        return StepResult("counted", 0.0, False, False, {})

    async def areset(self, task: Task) -> str:
        return task.instruction

    async def astep(self, action: str) -> StepResult:
        return self.step(action)


def agent(counter: Any) -> Any:
    model = Instant().bind_tools([counter])

    def call(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    async def acall(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("model", acall if counter is acount else call)
    graph.add_node("tools", ToolNode([counter]))
    graph.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
    return graph.compile()


PAYLOAD = {"messages": [("user", "count")]}
SYNC, ASYNC = agent(count), agent(acount)


def plain() -> None:
    for _ in range(RUNS):
        assert len(SYNC.invoke(PAYLOAD)["messages"]) == CALLS + 1


def dreamed() -> None:
    for _ in range(RUNS):
        with simulated(SYNC, policy=Instant(), environment=World(), task=TASK) as episode:
            episode.invoke(PAYLOAD)
        assert len(episode.steps) == 4


def plain_async() -> None:
    async def run() -> None:
        for _ in range(RUNS):
            assert len((await ASYNC.ainvoke(PAYLOAD))["messages"]) == CALLS + 1

    asyncio.run(run())


def dreamed_async() -> None:
    async def run() -> None:
        for _ in range(RUNS):
            async with simulated(ASYNC, policy=Instant(), environment=World(), task=TASK) as episode:
                await episode.ainvoke(PAYLOAD)
            assert len(episode.steps) == 4

    asyncio.run(run())


def seconds(work: Callable[[], None]) -> float:
    before = time.process_time()
    work()
    return (time.process_time() - before) / RUNS


def in_turns(first: Callable[[], None], second: Callable[[], None], switch: Callable[[bool], None] = bool) -> list[Any]:
    """Pairs of CPU seconds per run; each pair begins with the other one."""
    pairs = []
    for number in range(ROUNDS + 4):
        pair = {}
        for which in (False, True) if number % 2 else (True, False):
            switch(which)
            pair[which] = seconds(second if which else first)
        pairs.append((pair[False], pair[True]))
    return pairs[4:]  # warm


def patched() -> list[tuple[type, str, Any, Any]]:
    """Every method that simulation has replaced: class, name, the original, the replacement."""
    functions = [found for found in gc.get_objects() if isinstance(found, FunctionType) and "__dreamgym__" in vars(found)]
    return [(*vars(function)["__dreamgym__"], vars(function)["__wrapped__"], function) for function in functions]


def hook_share(run: Callable[[], None], whole: float) -> float:
    """The audit hook's share of a run: how many events it hears, times what one costs."""
    heard: list[str] = []
    listening = True
    sys.addaudithook(lambda event, args: heard.append(event) if listening else None)
    run()
    listening = False
    events = len(heard) / RUNS
    before = time.process_time()
    for _ in range(200_000):
        guard._hook("object.__getattr__", ())
    return events * (time.process_time() - before) / 200_000 / whole


def main() -> None:
    plain(), plain_async()
    install_episode(guarded=True)
    methods = patched()

    def switch(on: bool) -> None:
        for owner, name, original, replacement in methods:
            setattr(owner, name, replacement if on else original)

    rows = {}
    for mode, usual, dream in (("sync", plain, dreamed), ("async", plain_async, dreamed_async)):
        dormant = in_turns(usual, usual, switch)
        switch(True)
        active = in_turns(usual, dream)
        base = statistics.median(pair[0] for pair in dormant)
        rows[mode] = {
            "plain_ms": 1000 * base,
            "dormant": statistics.median(after / before for before, after in dormant) - 1 + hook_share(usual, base),
            "active_ms_per_call": 1000 * statistics.median(after - before for before, after in active) / CALLS,
            "best_active_ms_per_call": 1000 * (min(pair[1] for pair in active) - min(pair[0] for pair in active)) / CALLS,
        }
    print(f"{len(methods)} methods patched; {CALLS} calls a run, {ROUNDS} pairs of {RUNS} runs")
    print(f"{'':6} {'plain run':>11} {'dormant':>9} {'active, a call':>15} {'best':>9}")
    for mode, row in rows.items():
        print(
            f"{mode:6} {row['plain_ms']:8.2f} ms {row['dormant']:+9.2%} {row['active_ms_per_call']:12.3f} ms "
            f"{row['best_active_ms_per_call']:6.3f} ms"
        )
    print(f"targets: dormant below {TARGET_DORMANT:.0%}, active below {TARGET_ACTIVE} ms a call")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
