"""The zoo itself: every agent runs as its user means it to, with its own model and its real tools.

Nothing of the library runs here; what it is tested with is. So all of it is slow: a change of the zoo or of LangGraph is what
it would find, and the tests that dream an agent run it plainly too.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from zoo import KINDS, Built, Kind, World, signed, view
from zoo.hostile import HOSTILE, Hostile, hostile_agent, hostile_node, scene
from zoo.policy import ScriptedPolicy, policy_for

pytestmark = pytest.mark.slow

STATE_TOOLS = {"write_todos", "write_file", "ls", "task"}
"""Of deepagents: nobody notes in `World.passed` that they ran; the kind's `expect` sees it in the state."""

OWN_CLASS = {"fresh_model", "overrides_invoke", "async_only_model"}
"""Kinds that make their model of a class of their own."""


def runs(built: Built) -> list[Any]:
    """Its ways to run, each a function of nothing."""
    ways = {
        "sync": lambda: built.invoke(built.graph, built.payload),
        "async": lambda: asyncio.run(built.ainvoke(built.graph, built.payload)),
    }
    return [ways[mode] for mode in (ways if built.mode == "both" else [built.mode])]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_runs_plainly_and_the_same_twice(kind: Kind, tmp_path: Path) -> None:
    seen = []
    for number in range(2):
        world = World(folder=tmp_path / str(number))
        built = kind.build(world)
        if number == len(runs(built)):
            break
        run = runs(built)[number]
        first = run()
        built.expect(first)
        with pytest.raises((AssertionError, LookupError, TypeError, ValueError)):
            built.expect({"messages": []})
        assert signed(first, "production") and not signed(first, "policy")
        assert world.model_calls > 0
        assert {name for name, _ in world.effects} == set(built.tools)
        assert sorted(world.effects) == world.disk()
        assert set(world.passed) <= set(built.passthrough)
        assert bool(world.passed) is bool(set(built.passthrough) - STATE_TOOLS)
        calls, effects = world.model_calls, len(world.effects)
        second = run()
        built.expect(second)
        assert view(second) == view(first)
        again = world.model_calls - calls
        assert again < calls if built.cached else again > 0
        assert built.cached or not built.tools or len(world.effects) > effects
        seen.append(view(first))
    assert all(result == seen[0] for result in seen)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
@pytest.mark.parametrize("build", [hostile_node, hostile_agent])
def test_hostile_acts_really_happen(build: Any, hostile: Hostile, tmp_path: Path) -> None:
    with scene(tmp_path / "scene") as world:
        built = build(hostile, world)
        assert not hostile.happened(world)
        runs(built)[0]()
        assert hostile.happened(world)


def test_the_policy_says_who_it_is_and_honours_what_it_is_given(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    world.scripted(per_reply=2)
    policy = policy_for(world)
    assert policy.per_reply == 2
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("book", "pay")]
    said = policy.invoke("go", tools=tools)
    assert [call["name"] for call in said.tool_calls] == ["book", "pay"]
    chosen = policy.invoke("go", tools=tools, tool_choice={"type": "function", "function": {"name": "pay"}})
    assert [call["name"] for call in chosen.tool_calls] == ["pay"]
    assert not policy.invoke("go", tools=tools, tool_choice="none").tool_calls
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    answer = policy.invoke("go", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert json.loads(answer.text) == answer.additional_kwargs["parsed"] == {"city": "policy-city"}
    assert policy.invoke("go", stop=[" - done"]).text == "policy: go"
    assert policy.calls == 5 and policy.asked[0][1]["tools"] == tools and world.model_calls == 0


async def test_the_policy_streams_what_it_says(tmp_path: Path) -> None:
    policy = ScriptedPolicy(label="mine", per_reply=2)
    tools = [{"type": "function", "function": {"name": "book", "parameters": {"type": "object"}}}]
    parts = [part async for part in policy.astream("go", tools=tools)]
    assert len(parts) > 3 and len(sum(parts[1:], parts[0]).tool_calls) == 2
    words = list(policy.stream("go"))
    assert len(words) > 3 and "".join(word.text for word in words) == (await policy.ainvoke("go")).text
    assert policy.calls == 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name not in OWN_CLASS], ids=lambda kind: kind.name)
def test_the_policy_can_play_every_agent(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built with the policy as its own model, an agent does the same: what a simulation shows is not the policy's fault."""
    monkeypatch.setattr(World, "production", lambda self, fails=0, **script: ScriptedPolicy(**script))
    world = World(folder=tmp_path)
    built = kind.build(world)
    result = runs(built)[0]()
    built.expect(result)
    assert signed(result, "policy") and not signed(result, "production")
    assert {name for name, _ in world.effects} == set(built.tools) and world.model_calls == 0


def test_the_zoo_is_large_and_strange_to_us() -> None:
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names) >= 110
    sources = [path.read_text() for path in (Path(__file__).parent / "zoo").glob("*.py")]
    assert len(sources) > 5 and not any("dreamgym" in source for source in sources)
