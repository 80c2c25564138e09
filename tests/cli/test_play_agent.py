"""`dreamgym play my_app.py:graph`: a person answers the tool calls of an agent, typed on standard input."""

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import dreamgym_lg.cli.play as command
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.simulate.wall import wall
from dreamgym_lg.simulate.wall.wall import missing_for_wall
from dreamgym_lg.types import Task, Trajectory

AGENT = '''
import os
from typing import TypedDict

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph


class Model(BaseChatModel):
    """Looks for a room, books the first one and tells the answer."""

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **kwargs):
        return self

    def _generate(self, messages, *args, **kwargs):
        turn = sum(message.type == "ai" for message in messages)
        calls = [[("rooms", {"city": "Rome"})], [("book", {"room": 7})]]
        asked = [{"name": name, "args": args, "id": str(turn)} for name, args in (calls[turn] if turn < 2 else [])]
        text = "" if asked else f"Booked: {messages[-1].text}"
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text, tool_calls=asked))])


class Room(TypedDict):
    number: int


@tool
def rooms(city: str) -> list[Room]:
    """Rooms that are free."""
    raise AssertionError("the real tool ran")


@tool
async def book(room: int) -> str:
    """Book a room."""
    raise AssertionError("the real tool ran")


class Rude(Model):
    """Writes to the disk by itself, as a model that goes to the network does."""

    def _generate(self, messages, *args, **kwargs):
        open("asked", "w").close()
        return super()._generate(messages, *args, **kwargs)


graph = create_agent(Model(), [rooms, book])
helper = create_agent(Model(), [book]).as_tool(name="helper", arg_types={"a": str})
two_models = create_agent(Rude(name="first"), [rooms, helper])
number = 3


def remove(state):
    book.invoke({"room": state["room"]}) if "room" in state else None
    os.remove("orders.db")


removes = StateGraph(dict).add_node("remove", remove).add_edge(START, "remove")


class Question(TypedDict, total=False):
    question: str
    answer: str


model = Model()
answers = StateGraph(Question).add_node("n", lambda state: {"answer": model.invoke("x").text}).add_edge(START, "n").compile()
'''

app = typer.Typer()
app.command()(command.play)
Sit = Callable[..., Result]


@pytest.fixture
def sit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sit:
    """Types lines at `dreamgym play own_agent.py:NAME`."""
    (tmp_path / "own_agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)

    def start(*lines: str, name: str = "graph", options: tuple[str, ...] = (), isolation: str | None = "guard") -> Result:
        given = [f"own_agent.py:{name}", *options, *(["--isolation", isolation] if isolation else [])]
        return CliRunner().invoke(app, given, input="\n".join(lines), env={"COLUMNS": "300"})

    return start


def at(text: str, function: str) -> str:
    """Where a line of the agent's is, as an episode tells it."""
    return f"own_agent.py:{AGENT.splitlines().index(text) + 1} in {function}"


def in_order(output: str, *texts: str) -> None:
    places = [output.find(text) for text in texts]
    assert -1 not in places and places == sorted(places), (places, output)


RECORDED = ("--replay-buffer", "replay.db", "--record")


def recorded() -> list[Trajectory]:
    with ReplayBuffer("replay.db") as buffer:
        return list(buffer.trajectories(run="play"))


walled = pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")


@pytest.mark.parametrize("isolation", ["guard", pytest.param(None, marks=[walled, pytest.mark.slow])])
def test_a_person_is_the_world_of_their_agent(isolation: str | None, sit: Sit) -> None:
    typed = (
        "A room in Rome.",
        '[{"number": 7}]',
        "It is\\",
        "booked.",
        "",
        "2",
        "0.5",
        "A room in Rome.",
        "[]",
        "No.",
        "",
        "1",
    )
    done = sit(*typed, options=RECORDED, isolation=isolation)
    assert done.exit_code == 0, done.output
    in_order(
        done.output,
        "The agent's own model, Model, is really asked.",
        "You are the world of this agent",
        "the agent calls rooms",
        'rooms(city) -> {"$defs": {"Room"',
        '"city": "Rome"',
        '[{"number": 7}]',
        "the agent calls book",
        '"room": 7',
        "the agent's message",
        "Booked: It is\nbooked.",
        "the agent's final answer",
        "is no number from 0 to 1",
        "what happened",
        'simulated: rooms {"city": "Rome"}',
        at("@tool", "rooms"),
        "in book",
        "failure: reward 0.5",
        "success: reward 1",
    )
    first, second = recorded()
    assert (first.reward, first.success, second.success, first.task.id) == (0.5, False, True, second.task.id)
    assert (first.source, first.experience_version, first.policy_version) == ("synthetic", "person", "its own")
    assert [step.next_observation for step in first.steps] == ['[{"number": 7}]', "It is\nbooked.", ""]


def test_an_answer_that_is_not_what_the_tool_returns_is_asked_again(sit: Sit) -> None:
    done = sit("A room.", "Two rooms.", '[{"number": "seven"}]', '[{"number": 7}]', "Yes.", "", "1")
    assert done.output.count("is not what the tool returns, JSON of the schema") == 2 and "success: reward 1" in done.output


@pytest.mark.parametrize("isolation", ["guard", pytest.param(None, marks=[walled, pytest.mark.slow])])
def test_what_is_stopped_is_shown_with_the_users_line(isolation: str | None, sit: Sit, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("orders.db").touch()
    monkeypatch.setenv("OPENAI_API_KEY", "never-asked")
    options = (*RECORDED, "--policy", "openai:gpt-5.4-mini")  # the graph holds no model
    done = sit('{"room": 7}', "Yes.", name="removes", options=options, isolation=isolation)
    assert Path("orders.db").exists() and done.exit_code == 0, done.output
    calls = at('    book.invoke({"room": state["room"]}) if "room" in state else None', "remove")
    removes = at('    os.remove("orders.db")', "remove")
    in_order(done.output, "simulated: ", calls, "blocked: os.remove of orders.db", removes)
    assert "failed: AccessBlocked" in done.output
    [episode] = recorded()
    assert [act.kind for act in episode.acts] == ["blocked"] and episode.error is not None


def test_an_agent_with_several_models_needs_a_policy(sit: Sit) -> None:
    done = sit("A room.", "Done.", "1", name="two_models", options=("--pass-through", "rooms"))
    assert done.exit_code == 2 and "has not one model (Model, Rude): name one --policy for all" in done.output
    assert not Path("asked").exists()


def test_without_a_wall_the_guard_is_chosen_by_name(sit: Sit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall, "missing_for_wall", lambda: ["Landlock"])
    done = sit("A room.", isolation=None)
    assert done.exit_code == 2 and "needs Landlock" in done.output and "--isolation guard" in done.output
    assert "You are the world" not in done.output and sit("A room.", "[]", "Yes.", "", "1").exit_code == 0


def test_a_person_is_the_agents_user_too(sit: Sit) -> None:
    done = sit("A room.", "[]", "No.", "And in Oslo?", "", "0", options=RECORDED)
    in_order(done.output, "Booked: No.", "your reply, empty to end>", "Booked: And in Oslo?", "failure: reward 0")
    [episode] = recorded()
    answers = [(step.next_observation, step.decided_by) for step in episode.steps]
    assert answers == [("", "person"), ("No.", "person"), ("And in Oslo?", "person"), ("", "")]  # an empty list is no text


def test_an_agent_without_messages_is_not_replied_to(sit: Sit) -> None:
    done = sit('{"question": "Where?"}', "0", name="answers")
    assert done.exit_code == 0 and "your reply" not in done.output and "failure: reward 0" in done.output, done.output


def test_help_is_explained_and_no_answer(sit: Sit) -> None:
    done = sit(
        "/help", "A room.", "/help", "/help", '[{"number": 7}]', "/srv/room-7", "/help", "", "/help", "1", options=RECORDED
    )
    assert done.output.count("/help shows this") == 6 and "success: reward 1" in done.output
    [episode] = recorded()
    assert [step.next_observation for step in episode.steps] == ['[{"number": 7}]', "/srv/room-7", ""]


def test_a_stored_task_is_played_once(sit: Sit) -> None:
    with ReplayBuffer("replay.db") as buffer:
        buffer.add_tasks([Task(id="rome", instruction="A room in Rome.", environment="rooms")])
    done = sit("[]", "No.", "", "0", "more", options=("--replay-buffer", "replay.db", "--task", "rome"))
    assert done.exit_code == 0 and "failure: reward 0" in done.output and "more" not in done.output
    assert recorded() == [], "without --record"
    done = sit(options=("--replay-buffer", "replay.db", "--task", "roma"))
    assert done.exit_code == 2 and "did you mean 'rome'" in done.output.lower()


@pytest.mark.parametrize("typed", [["/quit"], [], ["A room.", "/quit"], ["A room."], ["A room.", "[]\\"]])
def test_a_person_may_leave_at_any_question(typed: list[str], sit: Sit) -> None:
    done = sit(*typed, options=RECORDED)
    assert done.exit_code == 0 and recorded() == []
    assert ("it is not stored" in done.output) == (len(typed) > 1 or typed == ["A room."])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("grph", (), "grph"),
        ("number", (), "int holds no compiled graph"),
        ("graph", ("--record",), "--record needs a --replay-buffer"),
        ("graph", ("--task", "rome"), "--task needs a --replay-buffer"),
        ("graph", ("--experience-model", "x"), "--experience-model with own_agent.py:graph: you are the world"),
        ("graph", ("--policy", "no-such-provider:x"), "no-such-provider"),
    ],
)
def test_what_cannot_be_played_says_why(name: str, options: tuple[str, ...], said: str, sit: Sit) -> None:
    done = sit("A room.", name=name, options=options)
    assert done.exit_code == 2 and said in done.output


def test_a_file_that_is_not_there_and_a_policy_without_an_agent_say_so(sit: Sit) -> None:
    done = CliRunner().invoke(app, ["nobody.py:graph"], env={"COLUMNS": "300"})
    assert done.exit_code == 2 and "nobody.py is not a file" in done.output
    for option, value in (("--policy", "openai:x"), ("--isolation", "guard"), ("--pass-through", "a")):
        done = CliRunner().invoke(app, ["peckingorder", option, value], env={"COLUMNS": "300"})
        assert done.exit_code == 2 and f"{option} is for an agent's graph" in done.output
