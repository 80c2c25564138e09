"""Graphs that stop for a person, in an episode."""

from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import interrupt
from worlds import TASK, Answers, dream, names
from zoo import World
from zoo.base import ask, toolbox
from zoo.policy import ScriptedPolicy

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent, call_order, examine, simulated


def reviewed(world: World) -> Any:
    middleware = HumanInTheLoopMiddleware(interrupt_on={"book": True, "pay": True})
    return create_agent(world.model, list(toolbox(world)[:2]), middleware=[middleware], checkpointer=InMemorySaver())


async def test_interrupts_are_approved_by_default(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph = reviewed(world)
    episode, state = dream(graph, ScriptedPolicy(per_reply=2))
    assert names(episode) == ["book", "pay"] and not episode.truncated
    assert "__interrupt__" not in state and state["messages"][-1].text.startswith("policy: ")
    async with simulated(graph, policy=ScriptedPolicy(per_reply=2), environment=Answers(), task=TASK) as again:
        await again.ainvoke(ask())
    assert names(again) == ["book", "pay"] and list(graph.checkpointer.list(None)) == []


def test_interrupts_are_answered_as_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_order, "ABSENT_SECONDS", 0.05)  # what the call after a rejected one waits for it
    world = World(folder=tmp_path)
    asked = list[Any]()

    def reject_the_first(request: Any) -> Any:
        asked.append(request.value)
        return {"decisions": [{"type": "reject", "message": "too dear"}, {"type": "approve"}]}

    episode, state = dream(reviewed(world), ScriptedPolicy(per_reply=2), respond=reject_the_first)
    assert [action["name"] for action in asked[0]["action_requests"]] == ["book", "pay"]
    assert names(episode) == ["pay"] and any("too dear" in message.text for message in state["messages"])


def test_interrupts_of_a_node_and_without_end(tmp_path: Path) -> None:
    def node(state: dict) -> dict[str, Any]:
        return {"said": [interrupt({"question": n}) for n in range(state["questions"])]}

    graph = StateGraph(dict).add_node("node", node).add_edge(START, "node").compile(checkpointer=InMemorySaver())
    _, state = dream(graph, ScriptedPolicy(), payload={"questions": 2})
    assert state["said"] == ["yes", "yes"]
    _, state = dream(graph, ScriptedPolicy(), payload={"questions": 2}, respond=lambda asked: asked.value["question"])
    assert state["said"] == [0, 1]
    episode, _ = dream(graph, ScriptedPolicy(), payload={"questions": 10**6})
    assert episode.truncated


def test_an_action_that_must_not_be_approved_needs_respond(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    middleware = HumanInTheLoopMiddleware(interrupt_on={"book": {"allowed_decisions": ["edit", "reject"]}})
    graph = create_agent(world.model, [toolbox(world)[0]], middleware=[middleware], checkpointer=InMemorySaver())
    with pytest.raises(ConfigurationError, match="action 'book' may be answered by edit or reject alone: give respond="):
        dream(graph, ScriptedPolicy(sequence=("book",)))
    rejected = {"decisions": [{"type": "reject", "message": "no"}]}
    episode, _ = dream(graph, ScriptedPolicy(sequence=("book",)), respond=lambda interrupt: rejected)
    assert episode.steps == []


@pytest.mark.parametrize("breakpoints", [{"interrupt_before": ["tools"]}, {"interrupt_after": ["tools", "model"]}])
async def test_breakpoints_are_passed(breakpoints: dict[str, Any], tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph = create_agent(world.model, list(toolbox(world)[:2]), checkpointer=InMemorySaver(), **breakpoints)
    episode, state = dream(graph, ScriptedPolicy(sequence=("book", "pay")))
    assert names(episode) == ["book", "pay"] and not episode.truncated
    assert state["messages"][-1].text.startswith("policy: ")
    async with simulated(graph, policy=ScriptedPolicy(sequence=("book", "pay")), environment=Answers(), task=TASK) as again:
        await again.ainvoke(ask())
    assert names(again) == ["book", "pay"]


@pytest.mark.parametrize("kind", ["interrupt", "breakpoint"])
def test_a_graph_that_stops_and_has_no_checkpointer_to_go_on_from_is_refused(kind: str) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [("ai", interrupt("really?") if kind == "interrupt" else "done")]}

    options: dict[str, Any] = {"interrupt_before": ["node"]} if kind == "breakpoint" else {}
    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile(**options)
    with pytest.raises(ConfigurationError, match=f"stops at an? {kind}, and the graph has no checkpointer .*InMemorySaver"):
        dream(graph, ScriptedPolicy())
    assert [part.kind for part in examine(graph).refused] == ["interrupt"] * (kind == "breakpoint")


def test_breakpoints_of_a_subgraph_are_passed_and_none_lasts_for_ever(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    inner = create_agent(world.model, list(toolbox(world)[:2]), interrupt_before=["tools"])
    graph = StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner").compile(checkpointer=InMemorySaver())
    episode, _ = dream(graph, ScriptedPolicy(sequence=("book", "pay")))
    assert names(episode) == ["book", "pay"]
    circle = StateGraph(MessagesState).add_node("node", lambda state: {}).add_edge(START, "node").add_edge("node", "node")
    episode, _ = dream(circle.compile(checkpointer=InMemorySaver(), interrupt_before="*"), ScriptedPolicy())
    assert episode.truncated


async def test_a_graph_behind_a_runnable_has_its_context_and_limit(tmp_path: Path) -> None:
    class Count(TypedDict):
        number: int

    def step(state: Count, runtime: Runtime[str]) -> Any:
        assert runtime.context == "shop"
        return {"number": state["number"] + 1}

    graph = StateGraph(Count, context_schema=str).add_node(step).add_edge(START, "step")
    graph.add_conditional_edges("step", lambda state: "step" if state["number"] < 40 else END)
    agent = SimulatedAgent(
        graph.compile().with_retry(stop_after_attempt=1),
        ScriptedPolicy(),
        payload=lambda task: {"number": 0},
        read_message=lambda state: str(state["number"]),
        recursion_limit=60,
        context="shop",
    )
    (episode,) = await rollout(agent, [TASK], Answers, source="synthetic")
    assert episode.error is None and "40" in episode.steps[-1].action


async def test_a_graph_behind_a_runnable_has_its_thread_and_is_approved(tmp_path: Path) -> None:
    graph = reviewed(World(folder=tmp_path)).with_retry()
    episode, state = dream(graph, ScriptedPolicy(per_reply=2))
    assert names(episode) == ["book", "pay"] and state["messages"][-1].text.startswith("policy: ")
    async with simulated(graph, policy=ScriptedPolicy(per_reply=2), environment=Answers(), task=TASK) as again:
        await again.ainvoke(ask())
    assert names(again) == ["book", "pay"]
