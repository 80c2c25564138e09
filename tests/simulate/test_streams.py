"""An ordinary agent in the dream, and with a policy in production: what it streams, and its checkpoints.

`tests/test_versions.py` plays this file with the oldest supported versions of LangGraph and LangChain, too.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hotel import PAYLOAD, TASK, Hotel, Model, build
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent, simulated, with_policy

MODES: list[Any] = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints"]


@pytest.fixture
def booked() -> list[str]:
    return []


def said(chunks: Any, label: str) -> bool:
    return f"{label} " in repr(chunks)


def thread(name: str) -> Any:
    return {"configurable": {"thread_id": name}}


# --- with a policy, in production ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*MODES, MODES], ids=str)
async def test_with_a_policy_a_graph_streams_as_before(mode: Any, booked: list[str]) -> None:
    graph = build("production", booked, checkpointer=InMemorySaver())
    served = with_policy(graph, Model(label="policy"))
    plain = list(graph.stream(PAYLOAD, thread("plain"), stream_mode=mode))
    chunks = list(served.stream(PAYLOAD, thread("served"), stream_mode=mode))
    async_chunks = [chunk async for chunk in served.astream(PAYLOAD, thread("async"), stream_mode=mode)]
    assert len(chunks) == len(async_chunks) == len(plain) and bool(chunks) == (mode != "custom")
    assert said(plain, "production") == (mode != "custom") == said(chunks, "policy") == said(async_chunks, "policy")
    assert not said([chunks, async_chunks], "production") and booked == ["Rome"] * 3
    assert graph.get_state(thread("served")).values["messages"][-1].text == "policy done", "one checkpointer"


# --- in the dream -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*MODES, MODES], ids=str)
async def test_in_the_dream_a_graph_streams_as_in_production(mode: Any, booked: list[str]) -> None:
    """As many chunks as of the graph with the policy, in its order; the tool's answer is the environment's."""
    graph = build("production", booked, checkpointer=InMemorySaver())
    real = list(with_policy(graph, Model(label="policy")).stream(PAYLOAD, thread("real"), stream_mode=mode))
    real_tools = len(booked)
    with simulated(graph, policy=Model(label="policy"), environment=Hotel(), task=TASK) as episode:
        chunks = list(graph.stream(PAYLOAD, thread("dream"), stream_mode=mode))
    async with simulated(graph, policy=Model(label="policy"), environment=Hotel(), task=TASK):
        async_chunks = [chunk async for chunk in graph.astream(PAYLOAD, thread("async dream"), stream_mode=mode)]
    assert len(booked) == real_tools == 1 and len(episode.steps) == 1
    assert len(chunks) == len(async_chunks) == len(real)
    for found in (chunks, async_chunks):
        assert said(found, "policy") == (mode != "custom") and not said(found, "production")
        assert ("A dreamed room." in repr(found)) == (mode != "custom") and "A real room." not in repr(found)
    assert graph.get_state(thread("dream")).values == {}, "production's checkpoints hold no dream"


async def test_an_interrupt_is_kept_by_the_checkpointer_and_resumed_with_the_policy(booked: list[str]) -> None:
    def confirm(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"confirmed: {interrupt('sure?')}")]}

    outer = StateGraph(MessagesState).add_node("agent", build("production", booked)).add_node("confirm", confirm)
    graph = outer.add_edge(START, "agent").add_edge("agent", "confirm").compile(checkpointer=InMemorySaver())
    served = with_policy(graph, Model(label="policy"))
    stopped = served.invoke(PAYLOAD, thread("1"))
    assert stopped["__interrupt__"] and said(stopped, "policy")
    assert served.get_state(thread("1")).next == ("confirm",)
    final = await served.ainvoke(Command(resume="yes"), thread("1"))
    assert final["messages"][-1].text == "confirmed: yes" and booked == ["Rome"]
    assert len(list(served.get_state_history(thread("1")))) == len(list(graph.get_state_history(thread("1")))) > 3


async def test_rollout_dreams_it_and_plays_it(booked: list[str]) -> None:
    graph = build("production", booked)
    dreams = await rollout(SimulatedAgent(graph, Model(label="policy")), [TASK], Hotel, source="synthetic", num_generations=3)
    assert [(each.error, each.success, len(each.steps)) for each in dreams] == [(None, True, 2)] * 3 and booked == []
    verify: Callable[..., float] = lambda task, state: float(said(state, "policy"))  # noqa: E731
    played = await rollout(SimulatedAgent(graph, Model(label="policy"), real=True, verify=verify), [TASK], source="real")
    assert played[0].success and played[0].steps[0].next_observation == "A real room." and booked == ["Rome"]
