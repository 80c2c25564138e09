"""Every kind of agent that simulation is tested on, in production beside a policy that acts as it does."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from langgraph.pregel import Pregel
from zoo import KINDS, Built, World, view
from zoo.policy import policy_for

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.production import CanaryLog, shadow, wait_for_shadows


def run(built: Built, graph: Any, mode: str) -> Any:
    """The user's own way to run it, and all that was simulated then."""

    async def played() -> Any:
        state = await built.ainvoke(graph, built.payload)
        assert graph is built.graph or await asyncio.to_thread(wait_for_shadows, graph, 30)
        return state

    if mode == "async":
        return asyncio.run(played())
    state = built.invoke(graph, built.payload)
    assert graph is built.graph or wait_for_shadows(graph, 30)
    return state


NOT_SEEN = ("overrides_tool_invoke", "supervisor", "node_of_plain_code")
"""Parts of the names of kinds whose tools are called where no callback of LangChain's listens."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KINDS)), ids=lambda number: KINDS[number].name)
def test_production_is_as_it_was_and_nothing_is_done_twice(number: int, tmp_path: Path) -> None:
    """In the same run of it, a policy that acts alike is found to."""
    kind, worlds = KINDS[number], [World(folder=tmp_path / name) for name in ("plain", "shadowed")]
    plain = kind.build(worlds[0])
    mode = ("sync", "async")[number % 2] if plain.mode == "both" else plain.mode
    if not isinstance(plain.graph, Pregel):
        pytest.skip("is no graph")
    before = run(plain, plain.graph, mode)
    built = kind.build(worlds[1])  # one at a time: they may share a global
    options: dict[str, Any] = {"pass_through": built.passthrough, "simulate_nodes": built.nodes}
    try:
        graph = shadow(built.graph, policy_for(worlds[1], label="production"), log=tmp_path / "log.db", **options)
    except ConfigurationError as error:
        assert re.search(
            "no dreamed episode of this graph can be right|hand work to threads of their own|give context=", str(error)
        )
        pytest.skip("a dream cannot play it")
    state = run(built, graph, mode)
    built.expect(state)
    assert view(state) == view(before)
    assert worlds[1].disk() == worlds[0].disk() and worlds[1].model_calls == worlds[0].model_calls
    pairs = [pair for pair in CanaryLog(tmp_path / "log.db").pairs()[0] if pair.status == "compared"]
    if pairs and not any(part in kind.name for part in NOT_SEEN):
        assert all(pair.same_writes for pair in pairs)
