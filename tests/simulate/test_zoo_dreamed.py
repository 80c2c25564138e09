"""Every kind of the zoo in the dream, unmodified: the policy and the world answer, production and the disk hear nothing."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langgraph.pregel import Pregel
from worlds import TASK, Answers
from zoo import KINDS, RACING, Built, Kind, World, signed, view
from zoo.policy import policy_for

from dreamgym_lg.simulate import SimulatedEpisode, simulated

MODES = [(kind, mode) for kind in KINDS for mode in ("sync", "async")]


def the_graph(graph: Any) -> Any:
    return graph


class Streamed:
    """The same graph for whoever reads its stream: the last values are the result."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return result(list(self.graph.stream(*args, **self.shown(), **kwargs)))

    async def ainvoke(self, *args: Any, **kwargs: Any) -> Any:
        return result([part async for part in self.graph.astream(*args, **self.shown(), **kwargs)])

    def shown(self) -> dict[str, Any]:
        """All that can be read, and of the values those that `invoke` returns."""
        return {"stream_mode": ["values", "updates", "messages", "custom"], "output_keys": self.graph.output_channels}


def result(parts: list[Any]) -> Any:
    values = [value for mode, value in parts if mode == "values"]
    asked = [part["__interrupt__"] for mode, part in parts if mode == "updates" and "__interrupt__" in part]
    return {**values[-1], "__interrupt__": [each for row in asked for each in row]} if asked else values[-1]


def dream(built: Built, mode: str, episode: SimulatedEpisode, shown: Callable[[Any], Any]) -> Any:
    """The user's own way to run it, inside of the episode."""
    graph = shown(built.graph) if isinstance(built.graph, Pregel) else built.graph

    async def run() -> Any:
        async with episode:
            return await built.ainvoke(graph, built.payload)

    if mode == "async":
        return asyncio.run(run())
    with episode:
        return built.invoke(graph, built.payload)


@pytest.mark.parametrize(("kind", "mode"), MODES, ids=lambda part: part if isinstance(part, str) else part.name)
def test_is_simulated_whole_and_is_itself_afterwards(kind: Kind, mode: str, tmp_path: Path) -> None:
    """Once as its user runs it, then streamed: both are the same episode."""
    world = World(folder=tmp_path)
    built = kind.build(world)
    if built.mode not in ("both", mode):
        pytest.skip(f"runs {built.mode} only")
    before = sorted(tmp_path.iterdir())
    seen = []
    for shown in (the_graph, Streamed):
        policy = policy_for(world)
        environment = Answers({"book": "booked"} if kind.name in RACING else built.answers)
        options: Any = {"pass_through": built.passthrough, "simulate_nodes": built.nodes}
        episode = simulated(built.graph, policy=policy, environment=environment, task=TASK, **options)
        result = dream(built, mode, episode, shown)

        assert world.effects == [] and sorted(tmp_path.iterdir()) == before, "the disk was touched"
        assert episode.blocked == []
        assert world.model_calls == 0 and world.asked == [], "a production model was asked"
        assert policy.calls == len(episode.calls) > 0
        assert not signed(result, "production")
        called = {json.loads(step.action)["name"].removeprefix("node:") for step in episode.steps if step.valid}
        assert called == {*built.tools, *built.reads}
        assert set(built.passthrough) >= set(world.passed)
        steps = [(step.observation, step.action, step.next_observation) for step in episode.steps]
        if kind.name in RACING:  # the first call to come is open, and with it what is seen before the next
            steps = sorted(("", action, answer) for _, action, answer in steps)
        seen.append((view(result), steps))
    assert seen[0] == seen[1], "the same actions and answers give the same episode, and the first left nothing behind"

    plain = (
        asyncio.run(built.ainvoke(built.graph, built.payload)) if mode == "async" else built.invoke(built.graph, built.payload)
    )
    built.expect(plain)
    assert signed(plain, "production") and not signed(plain, "policy")
    assert {name for name, _ in world.effects} == set(built.tools)
