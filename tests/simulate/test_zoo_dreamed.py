"""Every kind of the zoo in the dream, unmodified: the policy and the world answer, production and the disk hear nothing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from worlds import TASK, Answers
from zoo import KINDS, Built, Kind, World, signed, view
from zoo.policy import policy_for

from dreamgym_lg.simulate import SimulatedEpisode, simulated

RACING = ("send_fan_out", "batch_of_runs", "thread_pool")
"""Kinds in which threads act at once: whose call comes first is open, so the world must answer all the same."""

MODES = [(kind, mode) for kind in KINDS for mode in ("sync", "async")]


def dream(built: Built, mode: str, episode: SimulatedEpisode) -> Any:
    """The user's own way to run it, inside of the episode."""

    async def run() -> Any:
        async with episode:
            return await built.ainvoke(built.graph, built.payload)

    if mode == "async":
        return asyncio.run(run())
    with episode:
        return built.invoke(built.graph, built.payload)


@pytest.mark.parametrize(("kind", "mode"), MODES, ids=lambda part: part if isinstance(part, str) else part.name)
def test_is_simulated_whole_and_is_itself_afterwards(kind: Kind, mode: str, tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    built = kind.build(world)
    if built.mode not in ("both", mode):
        pytest.skip(f"runs {built.mode} only")
    before = sorted(tmp_path.iterdir())
    seen = []
    for _ in range(2):
        policy, environment = policy_for(world), Answers({"book": "booked"} if kind.name in RACING else None)
        episode = simulated(built.graph, policy=policy, environment=environment, task=TASK, pass_through=built.passthrough)
        result = dream(built, mode, episode)

        assert world.effects == [] and sorted(tmp_path.iterdir()) == before, "the disk was touched"
        assert episode.blocked == []
        assert world.model_calls == 0, "a production model was asked"
        assert policy.calls == len(episode.calls) > 0
        assert not signed(result, "production")
        assert {json.loads(step.action)["name"] for step in episode.steps if step.valid} == set(built.tools)
        assert set(built.passthrough) >= set(world.passed)
        seen.append((view(result), [(step.observation, step.action, step.next_observation) for step in episode.steps]))
    assert seen[0] == seen[1], "the same actions and answers give the same episode, and the first left nothing behind"

    plain = (
        asyncio.run(built.ainvoke(built.graph, built.payload)) if mode == "async" else built.invoke(built.graph, built.payload)
    )
    built.expect(plain)
    assert signed(plain, "production") and not signed(plain, "policy")
    assert {name for name, _ in world.effects} == set(built.tools)
