"""What an agent's code did in an episode, in order and with its line: what is read when a dreamed episode went wrong."""

import asyncio
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command
from test_tools import Saying
from worlds import TASK, Answers
from zoo.models import ScriptedModel

from dreamgym_lg import ReplayBuffer, Step, Trajectory
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent
from dreamgym_lg.types import Act


@tool
def book(city: str) -> str:
    """Book a room."""
    raise AssertionError("the real tool ran")


@tool
def note(text: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
    """Note a text in the state."""
    return Command(update={"messages": [ToolMessage(f"noted {text}", tool_call_id=tool_call_id)]})


@tool
def look(city: str) -> str:
    """Look, for real."""
    return os.listdir(city)[0] if os.path.isdir(city) else book.invoke({"city": city})


def number(text: str) -> int:
    """Of the one line of this file that is `text`."""
    return [line.strip() for line in Path(__file__).read_text().splitlines()].index(text) + 1


def told(episode: Trajectory) -> list[tuple[str, str]]:
    """Kind and text of what happened, but the final answer."""
    shown = [each for each in episode.in_order if not (isinstance(each, Step) and each.terminated)]
    return [(each.kind, each.text) if isinstance(each, Act) else ("simulated", each.action) for each in shown]


async def play(graph: Any, says: Any, buffer: ReplayBuffer, **options: Any) -> Trajectory:
    """One episode, as it is stored."""
    agent = SimulatedAgent(graph, Saying(says=says), **options)
    await rollout(agent, [TASK], Answers, source="synthetic", run="acts", replay_buffer=buffer)
    [stored] = buffer.trajectories(run="acts")
    return stored


def ending(act: Any, *, asynchronous: bool) -> Any:
    """An agent with a tool node and, behind it, a node of plain code."""

    def ask(state: MessagesState) -> Any:
        return {"messages": [ScriptedModel(label="production").bind_tools([book, note, look]).invoke(state["messages"])]}

    async def aact(state: MessagesState) -> Any:
        return await asyncio.create_task(acting())

    async def acting() -> Any:
        return act()

    graph = StateGraph(MessagesState).add_node("ask", ask).add_node("tools", ToolNode([book, note, look]))
    graph.add_node("act", aact if asynchronous else lambda state: act())
    return graph.add_edge(START, "ask").add_edge("ask", "tools").add_edge("tools", "act").compile()


SAYS = [[("book", {"city": "Rome"}), ("note", {"text": "x"}), ("fly", {}), ("look", {"city": "Bonn"})]]
CALLED = [
    ("simulated", '{"arguments": {"city": "Rome"}, "name": "book"}'),
    ("passed through", '{"arguments": {"text": "x"}, "name": "note"}'),
    ("simulated", '{"arguments": {}, "name": "fly"}'),
    ("passed through", '{"arguments": {"city": "Bonn"}, "name": "look"}'),
    ("simulated", '{"arguments": {"city": "Bonn"}, "name": "book"}'),
]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_failed_episode_tells_in_order_what_was_done_where(asynchronous: bool, tmp_path: Path) -> None:
    kept = tmp_path / "orders.db"
    kept.touch()

    def act() -> Any:
        book.invoke({"city": "Ulm"})
        try:
            os.remove(kept)
        except BaseException:
            return {"messages": []}

    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        episode = await play(ending(act, asynchronous=asynchronous), SAYS, buffer, pass_through=["look"])
    assert kept.exists() and episode.error is not None and "os.remove" in episode.error
    by_hand = ("simulated", '{"arguments": {"city": "Ulm"}, "name": "book"}')
    assert told(episode) == [*CALLED, by_hand, ("blocked", f"os.remove of {kept}")]
    lines = [each.line.removeprefix(f"{__file__}:") for each in episode.in_order]
    assert [line.partition(" in ")[2] for line in lines] == ["book", "note", "", "look", "look", "act", "act"]
    assert lines[0] == f"{number('def book(city: str) -> str:') - 1} in book", "a tool node's call: where the tool is written"
    assert lines[5:] == [f"{number(text)} in act" for text in ('book.invoke({"city": "Ulm"})', "os.remove(kept)")]
    assert [each.answer for each in episode.acts] == ["noted x", episode.steps[2].next_observation, ""]
    assert episode.steps[2].next_observation.endswith("of book") and not episode.steps[1].valid


async def test_what_the_agents_code_raised_is_the_last_act(tmp_path: Path) -> None:
    def act() -> Any:
        return {}["customer"]

    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        episode = await play(ending(act, asynchronous=False), [], buffer)
    [last] = episode.acts
    assert (last.kind, last.text, last.after) == ("raised", "KeyError: 'customer'", 0)
    raises = number('return {}["customer"]')
    assert last.line == f"{__file__}:{raises} in act"


async def test_an_act_of_no_line_of_its_own_names_the_node_and_not_who_runs_the_graph(tmp_path: Path) -> None:
    node = partial(shutil.copytree, Path(__file__).parent, tmp_path / "copy")
    graph = StateGraph(dict).add_node("bare", node).add_edge(START, "bare").compile()
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        episode = await play(graph, [], buffer)
    assert [(act.kind, act.line) for act in episode.acts] == [("blocked", "node 'bare'")]


async def test_a_played_episode_keeps_what_passed_through(tmp_path: Path) -> None:
    agent = create_agent(ScriptedModel(label="production"), [book, note])
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        episode = await play(agent, [[("note", {"text": "a"})], [("book", {"city": "Rome"}), ("note", {"text": "b"})]], buffer)
        assert episode.error is None and [act.after for act in episode.acts] == [0, 1]
        assert [each.action if isinstance(each, Step) else each.answer for each in episode.in_order][:-1] == [
            "noted a",
            '{"arguments": {"city": "Rome"}, "name": "book"}',
            "noted b",
        ]
