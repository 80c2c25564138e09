"""Agents that cannot be right in a dream are refused before the first episode; what they are told is what would happen."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from worlds import TASK, Answers
from zoo.base import ask
from zoo.hostile import scene
from zoo.policy import policy_for
from zoo.refused import REFUSED

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.simulate import Allow, RealAccessBlocked, examine, simulated

EACH = pytest.mark.parametrize(("build", "said", "advice"), [pytest.param(*each, id=each[0].__name__) for each in REFUSED])


@EACH
def test_it_is_refused_with_what_to_do(build: Any, said: str, advice: str, tmp_path: Path) -> None:
    with scene(tmp_path) as world:
        graph = build(world)
        with pytest.raises(ConfigurationError, match=rf"no dreamed episode of this graph can be right: .*\({said}\).*{advice}"):
            AgentWorld(graph)
        allowed = {"allow": Allow(hosts=["127.0.0.1"], paths=[tmp_path])}
        if said == "stopped":
            AgentWorld(graph, **allowed)  # what is stopped may be allowed by name
        else:
            with pytest.raises(ConfigurationError):
                AgentWorld(graph, **allowed)
        assert world.effects == [] and world.hits == []


@EACH
def test_the_verdict_is_what_would_happen(build: Any, said: str, advice: str, tmp_path: Path) -> None:
    """Played all the same: something real happens unseen, or the guard stops it."""
    with scene(tmp_path) as world:
        graph = build(world)
        found = {part.handling for part in examine(graph).problems}
        assert found == {said}
        before = sorted(tmp_path.rglob("*")), _texts(tmp_path)
        episode = simulated(graph, policy=policy_for(world), environment=Answers(), task=TASK)
        result = asyncio.run(_played(episode))
        harmed = (sorted(tmp_path.rglob("*")), _texts(tmp_path)) != before or world.hits or world.effects
        assert bool(episode.blocked) == (said == "stopped")
        assert bool(harmed or world.model_calls or world.passed or "production" in str(result)) == (said != "stopped")


async def _played(episode: Any) -> Any:
    try:
        async with episode:
            return await episode.ainvoke(ask())
    except RealAccessBlocked as error:
        return error.blocked
    except Exception as error:
        return type(error)


def _texts(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()]
