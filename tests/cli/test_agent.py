"""`dreamgym doctor` and `dreamgym import`, in this process and as the command that a user types."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dreamgym_lg import ReplayBuffer
from dreamgym_lg.cli.app import app
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.wall import wall
from dreamgym_lg.simulate.wall.wall import missing_for_wall
from dreamgym_lg.user_code import load_agent, load_object

APP = '''
import io
import os
from contextlib import asynccontextmanager, closing, contextmanager
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph, MessagesState
from langgraph.prebuilt import ToolNode

print("the module speaks")
opened_by = io.StringIO()

@tool
def book(city: str) -> str:
    """Book a room."""
    os.remove(city)

model = GenericFakeChatModel(messages=iter([]))

def think(state):
    return {"messages": [model.invoke(state["messages"])]}

def log(state):
    open("log.txt", "w").write("x")
    return {}

def create(*nodes):
    builder = StateGraph(MessagesState).add_node("think", think).add_node("tools", ToolNode([book]))
    for node in nodes:
        builder.add_node("log", node).add_edge("tools", "log")
    return builder.add_edge(START, "think").add_edge("think", "tools")

uncompiled = create()
clean = uncompiled.compile()
graph = create(log).compile()

def factory():
    return clean

async def configured(config):
    assert config["configurable"].get("user_id") is None
    return clean

@contextmanager
def opened(config):
    with closing(opened_by):
        yield clean

@asynccontextmanager
async def opened_async():
    with closing(opened_by):
        yield clean

def greedy(first, second):
    return clean

def failing():
    raise KeyError("no settings")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_agent", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "my_agent.py").write_text(APP)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    shown = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})
    return shown.exit_code, shown.stdout


def doctor(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dreamgym_lg.cli.app", "doctor", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


async def test_an_async_factory_is_called_inside_a_running_loop_too(folder: Path) -> None:
    """As in a notebook."""
    (folder / "later.py").write_text("async def make():\n    return 'an agent'\n")
    assert load_object(f"{folder}/later.py:make") == "an agent"


@pytest.mark.slow
def test_the_command_tells_what_cannot_be_simulated_and_how_to_fix_it(folder: Path) -> None:
    done = doctor("my_agent.py:graph", "--json", cwd=folder)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    handling = {(each["kind"], each["name"]): each["handling"] for each in found["parts"]}
    assert handling["model", "GenericFakeChatModel"] == handling["tool", "book"] == "simulated"
    assert handling["code", "think"] == handling["code", "log"] == "passes through"
    (stopped,) = (each for each in found["parts"] if each["handling"] == "stopped")
    assert "my_agent.py" in stopped["name"] + stopped["advice"] or "wall stopped" in stopped["advice"]
    assert not found["ready"]
    assert found["isolation"] == {"process": not missing_for_wall(), "missing": missing_for_wall(), "limits": []}
    assert "the module speaks" in done.stderr

    fixed = doctor("my_agent:graph", "--simulate-node", "log", cwd=folder)
    assert fixed.returncode == 0, fixed.stdout
    assert "book" in fixed.stdout and "a wall of the kernel" in " ".join(fixed.stdout.split())
    assert not (folder / "log.txt").exists()


@pytest.mark.slow
def test_the_table_names_parts_handling_and_fixes(folder: Path) -> None:
    code, shown = run("doctor", "my_agent.py:graph")
    assert code == 1
    assert "move it into a tool" in shown and "No episode that reaches it can be right" in shown and "in log" in shown
    assert "unknown: counts as writing" in " ".join(shown.split()) and shown.count('writes=["book"]') == 1
    code, shown = run("doctor", "my_agent.py:graph", "--writes", "boook")
    assert code == 2 and "Did you mean 'book'" in shown
    code, shown = run("doctor", "my_agent.py:clean", "--pass-through", "book")
    assert code == 0, "its model binds no tools, so that the tried episode calls none"


TWO_NODES = """
from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import SystemMessage
from langgraph.graph import START, MessagesState, StateGraph


class Model(GenericFakeChatModel):
    def bind_tools(self, tools, **kwargs):
        return self.bind(tools=tools, **kwargs)


def book(city: str) -> str:
    'Book a room.'
    raise AssertionError("the real tool ran")


def plan(state):
    return {"messages": model.invoke([SystemMessage("Plan first."), *state["messages"]])}


model = Model(messages=iter(()))
desk = create_agent(model, [book], system_prompt="You book rooms.")
graph = StateGraph(MessagesState).add_node(plan).add_node("desk", desk)
graph = graph.add_edge(START, "plan").add_edge("plan", "desk").compile()
"""


@pytest.mark.parametrize("isolation", ["guard", pytest.param("process", marks=pytest.mark.slow)])
def test_it_lists_what_a_prompt_learner_would_change(folder: Path, isolation: str) -> None:
    if isolation == "process" and missing_for_wall():
        pytest.skip("it needs the wall")
    (folder / "two_nodes.py").write_text(TWO_NODES)
    code, shown = run("doctor", "two_nodes.py:graph", "--json", "--isolation", isolation)
    assert code == 0, shown
    assert json.loads(shown)["components"] == {
        "system message of plan": "Plan first.",
        "system message of model": "You book rooms.",
        "description of book": "Book a room.",
    }
    if isolation == "guard":
        _, shown = run("doctor", "two_nodes.py:graph", "--isolation", isolation)
        assert "would change" in shown and "    system message of plan: 11 characters" in shown


LEAKS = """
from langgraph.graph import START, StateGraph

orders = open("orders.log", "a")
graph = StateGraph(dict).add_node("log", lambda state: {"written": orders.write("x")}).add_edge(START, "log").compile()
"""


@pytest.mark.slow
def test_the_verdict_is_that_of_the_isolation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "leaks.py").write_text(LEAKS)
    code, shown = run("doctor", "leaks.py:graph", "--isolation", "process")
    assert code == 2 and "behind the wall nothing is written but what allow= names" in " ".join(shown.split())
    assert not (folder / "orders.log").exists(), "it is imported behind the wall first"
    monkeypatch.setattr(wall, "missing_for_wall", lambda: ["Landlock"])
    code, shown = run("doctor", "leaks.py:graph")
    assert code == 1 and "could leak" in shown and "no guard sees" in shown


@pytest.mark.parametrize("name", ["clean", "uncompiled", "factory", "configured", "opened", "opened_async"])
@pytest.mark.parametrize("source", ["my_agent.py", "my_agent"])
def test_graphs_builders_and_factories_are_loaded(source: str, name: str, folder: Path) -> None:
    """Context managers, as LangGraph's server takes them, stay open."""
    assert set(load_agent(f"{source}:{name}").nodes) == {"__start__", "think", "tools"}
    gc.collect()
    assert not sys.modules["my_agent"].opened_by.closed


@pytest.mark.parametrize("isolation", ["guard", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("my_agent.py", "FILE.py:NAME"),
        ("none.py:graph", "is not a file"),
        ("none.such:graph", "ModuleNotFoundError"),
        ("my_agent.py:grap", "Did you mean 'graph'"),
        ("broken.py:graph", "nothing_of_this_name"),
        ("my_agent.py:failing", "no settings"),
        ("my_agent.py:greedy", "needs first, second"),
        ("my_agent.py:os", "holds no compiled graph"),
        ("my_agent.py:model", "holds no compiled graph"),
    ],
)
def test_what_cannot_be_loaded_is_said_plainly(given: str, told: str, isolation: str, folder: Path) -> None:
    if isolation == "process" and missing_for_wall():
        pytest.skip("it needs the wall")
    code, shown = run("doctor", given, "--isolation", isolation)
    assert code == 2
    assert told in shown and "Traceback" not in shown


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")
def test_an_agent_that_writes_a_log_as_it_is_imported_does_not_pass(folder: Path) -> None:
    (folder / "logs_at_import.py").write_text("import logging\nlogging.basicConfig(filename='agent.log')\n" + APP)
    code, shown = run("doctor", "logs_at_import.py:clean")
    assert code == 2 and "could not be loaded: PermissionError" in shown and "allow" in shown
    assert not (folder / "agent.log").exists()


@pytest.mark.slow
def test_a_file_of_a_package_keeps_its_relative_imports(folder: Path) -> None:
    package = folder / "shop_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(APP)
    (package / "agent.py").write_text("from .parts import clean as graph\n")
    code, shown = run("doctor", "shop_of_tests/agent.py:graph")
    assert code == 0, shown
    assert "book" in shown


def test_a_file_may_have_a_dot_in_its_name(folder: Path) -> None:
    (folder / "agent_v1.2.py").write_text("graph = ['the second']\n")
    assert load_object("agent_v1.2.py:graph") == ["the second"]


@pytest.mark.slow
def test_an_installed_package_of_the_user_s_is_no_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dreamgym_lg import user_code

    monkeypatch.setattr(user_code, "LIBRARIES", (*user_code.LIBRARIES, str(folder)))
    package = folder / "installed_shop"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "agent.py").write_text(APP)
    code, shown = run("doctor", "installed_shop.agent:graph")
    assert code == 1 and "No episode that reaches it can be right" in shown and "in log" in shown


@pytest.mark.slow
def test_an_unknown_tool_or_node_is_refused(folder: Path) -> None:
    assert run("doctor", "my_agent.py:graph", "--pass-through", "boook")[0] == 2
    code, shown = run("doctor", "my_agent.py:graph", "--simulate-node", "lgo")
    assert code == 2 and "Did you mean 'log'" in shown
    with pytest.raises(ConfigurationError):
        load_agent("my_agent.py:")
    with pytest.raises(ConfigurationError, match="nothing"):  # a module without a file
        load_object("builtins:nothing")


def conversation(city: str, success: bool = True) -> str:
    call = {"id": "1", "type": "function", "function": {"name": "book", "arguments": json.dumps({"city": city})}}
    messages = [
        {"role": "user", "content": f"A room in {city}."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Booked."},
        {"role": "assistant", "content": "Done."},
    ]
    return json.dumps({"messages": messages, "success": success})


def test_import_counts_what_it_read_and_shows_what_it_rejected(tmp_path: Path) -> None:
    traces, buffer = tmp_path / "traces.jsonl", tmp_path / "replay.db"
    traces.write_text("\n".join([conversation("Rome"), "{not json", conversation("Oslo", False), '{"messages": []}']))
    code, shown = run("import", str(traces), "--to", str(buffer), "--environment", "rooms")
    assert code == 0
    assert "2 traces read (1 successes, 4 steps, 2 tasks)" in shown and "2 new" in shown
    assert "2 rejected" in shown and "not JSON" in shown
    with ReplayBuffer(buffer) as stored:
        assert stored.count("trajectories") == 2
        assert {task.environment for task in stored.tasks()} == {"rooms"}

    code, shown = run("import", str(traces), "--to", str(buffer), "--environment", "rooms", "--strict")
    assert code == 1 and "0 new" in shown


def test_import_says_how_many_outcomes_were_corrected_and_how_many_beginnings_left_out(tmp_path: Path) -> None:
    traces, buffer = tmp_path / "traces.jsonl", tmp_path / "replay.db"
    given = ("import", str(traces), "--to", str(buffer))
    traces.write_text("\n".join([conversation("Rome"), conversation("Oslo")]))
    assert "2 new in" in run(*given)[1]
    longer = json.loads(conversation("Oslo"))
    longer["messages"] += [{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Bye."}]
    traces.write_text("\n".join([conversation("Rome", False), conversation("Oslo"), json.dumps(longer)]))
    _, shown = run(*given)
    assert "2 traces read (1 successes" in shown and "1 new, 1 updated with another outcome in" in shown
    assert "1 left out: longer traces begin with them" in shown
    assert "0 new in" in run(*given)[1]


def test_import_keeps_a_share_of_the_tasks_from_training(tmp_path: Path) -> None:
    traces, buffer = tmp_path / "traces.jsonl", tmp_path / "replay.db"
    traces.write_text("\n".join(conversation(f"city {n}") for n in range(200)))
    for _ in range(2):  # the same tasks each time
        code, shown = run("import", str(traces), "--to", str(buffer), "--held-out", "0.2")
        assert code == 0
    with ReplayBuffer(buffer) as stored:
        assert 20 < len(stored.tasks(split="test")) < 60
        assert f"{len(stored.tasks(split='test'))} of its tasks are kept for evaluation" in shown
        assert len(stored.tasks(split="train")) + len(stored.tasks(split="test")) == 200
        assert {step.observation for step in stored.similar("Book in city 1", "", k=300)}.isdisjoint(
            task.instruction for task in stored.tasks(split="test")
        )
    assert run("import", str(traces), "--to", str(buffer), "--held-out", "20")[0] == 2


def test_import_takes_rewards_by_id_and_scales_them(tmp_path: Path) -> None:
    traces, rewards, buffer = tmp_path / "traces.jsonl", tmp_path / "rewards.json", tmp_path / "replay.db"
    rows = [{**json.loads(conversation(city)), "id": city} for city in ("Rome", "Oslo")]
    traces.write_text("\n".join(map(json.dumps, rows)))
    given = ["import", str(traces), "--to", str(buffer), "--rewards", str(rewards), "--reward-range", "0", "100"]
    rewards.write_text('{"Rome": 50}')
    assert run(*given)[0] == 0
    with ReplayBuffer(buffer) as stored:
        assert [trajectory.reward for trajectory in stored.trajectories()] == [0.5, 1.0]
    for text, reason in (
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"Paris": 1}', "'Paris'"),
        ('{"Rome": 101}', "101"),
    ):
        rewards.write_text(text)
        code, shown = run(*given)
        assert code == 2 and reason in shown


def test_import_says_where_rewards_are_missing_or_all_zero(tmp_path: Path) -> None:
    """Traces without any reward became failures without a word."""
    traces, buffer = tmp_path / "traces.jsonl", tmp_path / "replay.db"
    rows = [{"messages": json.loads(conversation(city))["messages"]} for city in ("Rome", "Oslo")]
    traces.write_text("\n".join(map(json.dumps, rows)))
    code, shown = run("import", str(traces), "--to", str(buffer))
    assert code == 0 and "none of 2 traces has a reward: give --rewards" in shown
    traces.write_text("\n".join(conversation(city, False) for city in ("Rome", "Oslo")))
    code, shown = run("import", str(traces), "--to", str(buffer))
    assert code == 0 and "none of 2 traces is a success" in shown
    feedback = {"correctness": {"avg": 1}, "quality": {"avg": 0.5}}
    traces.write_text(json.dumps({"id": "r", "run_type": "chain", "outputs": rows[0], "feedback_stats": feedback}))
    code, shown = run("import", str(traces), "--to", str(buffer))
    assert code == 2 and "--reward-key KEY" in shown
    code, shown = run("import", str(traces), "--to", str(buffer), "--reward-key", "quality")
    assert code == 0 and "1 traces read (1 successes" in shown and "reward: give" not in shown


def test_import_says_what_it_cannot_read(tmp_path: Path) -> None:
    buffer = str(tmp_path / "replay.db")
    assert run("import", str(tmp_path / "none.jsonl"), "--to", buffer)[0] == 2
    (tmp_path / "bad.jsonl").write_text("{no\n")
    code, shown = run("import", str(tmp_path / "bad.jsonl"), "--to", buffer)
    assert code == 2 and "nothing in it can be read" in shown
    (tmp_path / "good.jsonl").write_text(conversation("Rome"))
    code, shown = run("import", str(tmp_path / "good.jsonl"), "--to", buffer, "--format", "otl")
    assert code == 2 and "Did you mean 'otel'" in shown
    assert run("import", str(tmp_path / "good.jsonl"), "--to", buffer, "--strict", "--format", "messages")[0] == 0
    (tmp_path / "foreign.db").write_bytes(b"no database, but long enough to be read as one of those" * 40)
    assert run("import", str(tmp_path / "good.jsonl"), "--to", str(tmp_path / "foreign.db"))[0] == 2


@pytest.mark.parametrize("command", ["doctor", "import"])
def test_help_has_an_example(command: str) -> None:
    code, shown = run(command, "--help")
    assert code == 0 and f"dreamgym {command}" in shown.split("Example")[1]
