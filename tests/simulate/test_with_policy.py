"""The graph of production with the trained policy in it: at which nodes, what it streams, and the original as it was."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt
from worlds import TASK, Answers
from zoo import World, signed
from zoo.base import ask, react, toolbox
from zoo.policy import ScriptedPolicy

from dreamgym_lg import with_policy
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate import Call, simulated
from dreamgym_lg.simulate.episode import AgentEpisode

MODES: list[Any] = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints"]


def desk(model: Any, tools: Any, **options: Any) -> Any:
    """A subgraph that acts, then a node that asks a person, writes to the custom stream and asks the model once more."""

    def closing(state: MessagesState) -> dict[str, Any]:
        approved = interrupt("close it?")
        get_stream_writer()({"approved": approved})
        return {"messages": [model.invoke([("human", f"closed: {approved}")])]}

    graph = StateGraph(MessagesState).add_node("agent", react(model, tools)).add_node("closing", closing)
    return graph.add_edge(START, "agent").add_edge("agent", "closing").compile(checkpointer=InMemorySaver(), **options)


def alike(chunks: list[Any]) -> list[str]:
    """The chunks as text, without what differs between two runs of the very same graph: ids and times."""
    differing = r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32}|\d{4}-\d\d-\d\dT[\d:.+]+| at 0x\w+"
    text = re.sub(differing, "*", "\n".join(map(repr, chunks)))
    numbered: dict[str, str] = {}
    return re.sub(r"call_\w+", lambda found: numbered.setdefault(found[0], f"call {len(numbered)}"), text).split("\n")


@pytest.mark.slow
@pytest.mark.parametrize("version, subgraphs", [("v1", False), ("v2", True)])
async def test_its_streams_are_those_of_a_graph_made_with_the_policy(version: Any, subgraphs: bool, tmp_path: Path) -> None:
    """In every mode, alone and all at once, over an interrupt and its answer."""
    world = World(folder=tmp_path)
    plain, served = (
        desk(ScriptedPolicy(), [toolbox(world)[0]]),
        with_policy(desk(world.model, [toolbox(world)[0]]), ScriptedPolicy()),
    )
    found = 0
    for number, mode in enumerate([*MODES, MODES]):
        streams: list[list[Any]] = []
        for graph in (plain, served):
            config: Any = {"configurable": {"thread_id": f"{number}"}}
            options: dict[str, Any] = {"stream_mode": mode, "subgraphs": subgraphs, "version": version}
            chunks = list(graph.stream(ask(), config, **options))
            chunks += list(graph.stream(Command(resume="yes"), config, **options))
            config = {"configurable": {"thread_id": f"{number} async"}}
            chunks += [chunk async for chunk in graph.astream(ask(), config, **options)]
            streams.append(chunks + [chunk async for chunk in graph.astream(Command(resume="yes"), config, **options)])
        assert alike(streams[1]) == alike(streams[0]), mode
        assert streams[0], mode
        found += sum(signed(chunk, "policy") for chunk in streams[1])
    assert found > 10 and world.model_calls == 0


async def test_its_events_are_those_of_a_graph_made_with_the_policy(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    plain, served = (
        react(ScriptedPolicy(), [toolbox(world)[0]]),
        with_policy(react(world.model, [toolbox(world)[0]]), ScriptedPolicy()),
    )
    events = []
    for graph in (plain, served):
        events.append(
            [event["event"] async for event in graph.astream_events(ask(), version="v2") if event["name"] != "ScriptedPolicy"]
        )
    assert len(events[0]) > 10 and events[1] == events[0] and world.model_calls == 0


def test_an_interrupt_is_answered_and_a_checkpoint_gone_back_to(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph = desk(world.model, [toolbox(world)[0]])
    served = with_policy(graph, ScriptedPolicy())
    config: Any = {"configurable": {"thread_id": "1"}}
    assert served.invoke(ask(), config)["__interrupt__"][0].value == "close it?"
    ended = served.invoke(Command(resume="yes"), config)
    assert ended["messages"][-1].text.startswith("policy: ") and len(world.effects) == 1
    asked = next(state for state in served.get_state_history(config) if state.next == ("closing",))
    again = graph.invoke(Command(resume="no"), asked.config)
    assert again["messages"][-1].text.startswith("production: "), "the original goes on from the served graph's checkpoint"


# --- at which nodes -----------------------------------------------------------------------------------------------------------


def team(world: World) -> Any:
    """`plan` asks a model; `worker` is a subgraph, `writer` a named agent in a node of plain code."""
    writer = create_agent(world.model, [], name="writer")

    def plan(state: MessagesState) -> dict[str, Any]:
        return {"messages": [world.model.invoke([("human", "plan")])]}

    def write(state: MessagesState) -> dict[str, Any]:
        return {"messages": writer.invoke(ask("write"))["messages"][-1:]}

    graph = StateGraph(MessagesState).add_node("plan", plan).add_node("worker", react(world.model, [toolbox(world)[0]]))
    graph.add_node("write", write).add_edge(START, "plan").add_edge("plan", "worker").add_edge("worker", "write")
    return graph.compile()


@pytest.mark.parametrize(
    "route, answered",
    [
        (None, {"plan", "worker", "write"}),
        (["plan"], {"plan"}),
        (["worker"], {"worker"}),
        (["writer"], {"write"}),
        (["write", "plan"], {"write", "plan"}),
        (lambda call: call.node == "plan", {"plan"}),
    ],
    ids=["all", "node", "subgraph", "agent", "two nodes", "function"],
)
def test_the_policy_answers_at_the_nodes_chosen(route: Any, answered: set[str], tmp_path: Path) -> None:
    """A node counts with its subgraph, an agent by its name, in production and in the dream alike."""
    world = World(folder=tmp_path)
    graph = team(world)
    served = with_policy(graph, ScriptedPolicy(), route=route)
    for stream in (served.stream, lambda *a, **k: iter(asyncio.run(collected(served, *a, **k)))):
        chunks = stream(ask(), stream_mode="updates")
        last = {name: update["messages"][-1] for chunk in chunks for name, update in chunk.items()}
        assert {name for name, message in last.items() if signed(message, "policy")} == answered
        assert {name for name, message in last.items() if signed(message, "production")} == {
            "plan",
            "worker",
            "write",
        } - answered
    with simulated(graph, policy=ScriptedPolicy(), environment=Answers(), task=TASK, route=route) as episode:
        episode.invoke(ask())
    assert {call.namespace.partition(":")[0] for call in episode.calls} == answered


async def collected(graph: Any, *args: Any, **options: Any) -> list[Any]:
    return [chunk async for chunk in graph.astream(*args, **options)]


def test_a_name_that_is_no_node_is_refused(tmp_path: Path) -> None:
    graph = react(World(folder=tmp_path).model, [toolbox(World(folder=tmp_path))[0]])
    with pytest.raises(ConfigurationError, match="unknown node in route=: 'modle'; known: model, tools. Did you mean 'model'"):
        with_policy(graph, ScriptedPolicy(), route=["modle"])
    for wrong in ("model", []):
        with pytest.raises(ConfigurationError, match="give a list of names of nodes, or a function of a Call"):
            with_policy(graph, ScriptedPolicy(), route=wrong)


def test_a_call_is_named_by_its_whole_path() -> None:
    graph = StateGraph(dict).add_node("node", lambda state: state).add_edge(START, "node").compile()
    call = Call("model", "team:1-2|worker:3-4|model:5", "alice", "gpt", False)
    for name, answered in {"team": True, "worker": True, "model": True, "alice": True, "tea": False, "gpt": False}.items():
        episode = AgentEpisode(graph, policy=ScriptedPolicy(), environment=None, route=[name])
        assert (episode.policy_for(call) is not None) is answered, name


# --- the original -------------------------------------------------------------------------------------------------------------


async def test_the_original_keeps_its_model_while_both_run(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    graph = react(world.model, [toolbox(world)[0]])
    before = dict(vars(graph)), dict(graph.nodes)
    served = with_policy(graph, ScriptedPolicy())
    states = await asyncio.gather(*((served if n % 2 else graph).ainvoke(ask()) for n in range(12)))
    for number, state in enumerate(states):
        mine, other = ("policy", "production") if number % 2 else ("production", "policy")
        assert signed(state, mine) and not signed(state, other), number
    assert (dict(vars(graph)), dict(graph.nodes)) == before
    assert world.model.invoke("beside").text.startswith("production: ")
