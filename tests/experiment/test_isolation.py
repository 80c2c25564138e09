"""How dreamed episodes of an agent are kept from the real world: chosen by how it is given, or by name; never silently less."""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from dreamgym_lg import DreamGym, ReplayBuffer, Step, Task, Trajectory
from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment import agent_arguments
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.simulate import Allow, SimulatedAgent
from dreamgym_lg.simulate.wall import kernel
from dreamgym_lg.simulate.wall.agent import WalledAgent
from dreamgym_lg.simulate.wall.wall import missing_for_wall
from dreamgym_lg.user_code import load_agent

walls = pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")

APP = """
import ctypes, os, sqlite3
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

FOLDER = os.path.dirname(__file__)

@tool
def rooms(city: str) -> list[dict[str, int]]:
    "The rooms of a city, by number."
    return [{"number": 1}]

def native(state):
    "Where the guard sees nothing."
    number = ctypes.CDLL(None).creat(os.path.join(FOLDER, "native").encode(), 0o600)
    allowed = ctypes.CDLL(None).creat(os.path.join(FOLDER, "allowed", "native").encode(), 0o600)
    return {"messages": [SystemMessage(f"{os.getpid()} {number >= 0} {allowed >= 0}")]}

model = GenericFakeChatModel(messages=iter([])).bind(tools=[convert_to_openai_tool(rooms)])
builder = StateGraph(MessagesState).add_node("native", native).add_node("tools", ToolNode([rooms]))
builder.add_node("ask", lambda state: {"messages": [model.invoke(state["messages"])]})
builder.add_edge(START, "native").add_edge("native", "ask").add_conditional_edges("ask", tools_condition)
graph = builder.add_edge("tools", "ask").compile()

connection = sqlite3.connect(os.path.join(FOLDER, "orders.db"))

def writes(state):
    connection.execute("CREATE TABLE t (a)")

leaks = StateGraph(MessagesState).add_node("writes", writes).add_edge(START, "writes").compile()

def verify(task, state):
    found = [message.content.split() for message in state["messages"] if message.type == "system"]
    return float(found == [[str(os.getpid()), "False", "True"]])
"""


class Policy(BaseChatModel):
    """Asks for the rooms, then answers with what the system message said."""

    @property
    def _llm_type(self) -> str:
        return "policy"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        call = {"name": "rooms", "args": {"city": "Rome"}, "id": "1"}
        asked = any(isinstance(message, ToolMessage) for message in messages)
        system = next(message.text for message in messages if message.type == "system")
        message = AIMessage(system) if asked else AIMessage("", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=message)])


class Dream(BaseChatModel):
    @property
    def _llm_type(self) -> str:
        return "dream"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        text = 'valid\nreward 0, continues\n[{"number": 7}]' if "> " in messages[-1].text else "(nothing)"
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])


def tasks(*splits: Any) -> Sequence[Task]:
    return [Task(id=split, instruction="Rooms in Rome?", environment="rooms", split=split) for split in splits]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rooms", raising=False)
    (tmp_path / "allowed").mkdir()
    (tmp_path / "my_rooms.py").write_text(APP)
    return tmp_path / "my_rooms.py"


def gym_of(graph: Any, folder: Path, **options: Any) -> DreamGym:
    buffer = ReplayBuffer(folder / "replay.db")
    given = {"replay_buffer": buffer, "experience_model": Dream(), "tasks": tasks("train", "test"), "out": folder / "gym"}
    return DreamGym(graph, **{**given, **options})


@pytest.mark.slow
@walls
def test_an_agent_given_by_its_path_dreams_behind_the_wall_and_is_real_here(app: Path, tmp_path: Path) -> None:
    load_agent(f"{app}:graph")
    verify = sys.modules["my_rooms"].verify
    allow = Allow(paths=[tmp_path / "allowed"])
    AgentWorld(f"{app}:graph", verify_dream=verify)  # loaded twice, it is the same function
    gym = gym_of(f"{app}:graph", tmp_path, allow=allow, verify_dream=verify, verify_real=verify)
    assert gym.world.isolation == "process" and "behind a wall of the kernel" in gym.world.promises
    (tool,) = gym.world.tools
    assert tool["function"]["returns"]["type"] == "array", "as the dream is shown it"
    _, (episode,) = gym.evaluate(Policy())
    assert episode.error is None and episode.steps[0].next_observation == '[{"number": 7}]'
    assert episode.success, "judged in the worker: nothing is written but what is allowed"
    assert episode.steps[-1].action != render_answer(f"{os.getpid()} False True")
    assert not (tmp_path / "native").exists() and (tmp_path / "allowed" / "native").exists()
    recorded = Trajectory(
        task=tasks("train")[0],
        steps=[
            Step(observation="Rooms?", action=render_call("rooms", {"city": "Bari"}), next_observation='[{"number": 2}]'),
            Step(observation='[{"number": 2}]', action=render_answer("2"), next_observation="", reward=1, terminated=True),
        ],
        success=True,
    )
    (dreamed,) = gym.world.as_dreamed([recorded])
    assert dreamed.task.tools == gym.world.tools and not (tmp_path / "native").exists()
    _, (episode,) = gym.evaluate(Policy(), real=True)
    assert not episode.success and episode.steps[-1].action == render_answer(f"{os.getpid()} True True")
    assert (tmp_path / "native").exists()


class AtProvider(Policy):
    """Its fields are those of ChatAnthropic and ChatOpenAI."""

    mcp_servers: list[dict[str, Any]] | None = None
    extra_body: dict[str, Any] | None = None


@pytest.mark.parametrize("own", [{"mcp_servers": [{"url": "https://shop"}]}, {"extra_body": {"tools": [{"type": "mcp"}]}}])
def test_a_model_whose_own_tools_run_at_its_provider_is_played_in_no_dream(own: dict[str, Any], app: Path) -> None:
    world = AgentWorld(load_agent(f"{app}:graph"), verify_real=lambda task, state: 1.0)
    world.agent(AtProvider(), real=False)
    with pytest.raises(ConfigurationError, match=f"AtProvider has tools in {next(iter(own))}.*really run at its provider"):
        world.agent(AtProvider(**own), real=False)
    world.agent(AtProvider(**own), real=True)


def test_an_object_is_guarded_and_what_that_cannot_promise_is_said_once(
    app: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent_arguments._warn_of_guard.cache_clear()
    graph = load_agent(f"{app}:graph")
    with caplog.at_level(logging.WARNING):
        worlds = [AgentWorld(graph), AgentWorld(graph), AgentWorld(f"{app}:graph", isolation="guard")]
    assert [world.isolation for world in worlds] == ["guard"] * 3
    assert all(isinstance(world.agent(Policy(), real=False), SimulatedAgent) for world in worlds)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "not native code (pyarrow, torch.save" in line and "'FILE.py:NAME' is played behind a wall" in line
    with pytest.raises(ConfigurationError, match="'process' of a CompiledStateGraph.*'FILE.py:NAME'"):
        AgentWorld(graph, isolation="process")
    with pytest.raises(ConfigurationError, match="isolation='wall'.*'process' or 'guard'"):
        AgentWorld(graph, isolation="wall")  # type: ignore[arg-type]


def test_a_machine_that_cannot_plays_under_the_guard_and_says_so(
    app: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel, "landlock_abi", lambda: 0)
    with pytest.raises(ConfigurationError, match=r"Landlock, of Linux 5.13 .*choose isolation='guard' by name"):
        AgentWorld(f"{app}:graph", isolation="process")
    world = AgentWorld(f"{app}:graph")
    assert world.isolation == "guard" and isinstance(world.agent(Policy(), real=False), SimulatedAgent)
    assert "no wall here, which needs Landlock, of Linux 5.13 or later" in caplog.text


@pytest.mark.slow
@walls
def test_what_the_import_does_is_stopped_before_it_happens_here(tmp_path: Path) -> None:
    """As `logging.basicConfig(filename=...)` at the top of a file."""
    (tmp_path / "logs.py").write_text(f"open({str(tmp_path / 'log')!r}, 'w')\ngraph = None\n")
    with pytest.raises(ConfigurationError, match="logs.py could not be loaded: PermissionError.*; behind the wall nothing is"):
        AgentWorld(f"{tmp_path}/logs.py:graph")
    assert not (tmp_path / "log").exists()


@pytest.mark.slow
@walls
def test_an_import_that_reads_its_tools_from_an_mcp_server_is_loaded_behind_the_wall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of its own, which only answers; one that writes as it starts is stopped there, and named."""
    pytest.importorskip("langchain_mcp_adapters")
    server = Path(__file__).parents[1] / "simulate/zoo/mcp_server.py"
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, first in (("reads_tools", ""), ("writes_first", f"open({str(tmp_path / 'effect')!r}, 'w')")):
        (tmp_path / f"{name}.py").write_text(MCP.format(server=str(server), folder=str(tmp_path), first=first))
    with pytest.raises(ConfigurationError, match="writes_first.py could not be loaded: .*; behind the wall nothing is"):
        AgentWorld(f"{tmp_path}/writes_first.py:graph")
    assert not (tmp_path / "effect").exists()
    world = AgentWorld(f"{tmp_path}/reads_tools.py:graph")
    assert [tool["function"]["name"] for tool in world.tools] == ["book"] and not (tmp_path / "effects.txt").exists()


MCP = """
import asyncio, sys
from langchain_core.language_models import GenericFakeChatModel
from langchain_mcp_adapters.client import MultiServerMCPClient
from langgraph.prebuilt import create_react_agent

{first}
server = {{"command": sys.executable, "args": ["-S", {server!r}, {folder!r}], "transport": "stdio"}}
tools = asyncio.run(MultiServerMCPClient({{"hotel": server}}).get_tools())

class Model(GenericFakeChatModel):
    def bind_tools(self, tools, **kwargs):
        return self

graph = create_react_agent(Model(messages=iter([])), tools)
"""

NO_LANDLOCK = """
import os, sys
from dreamgym_lg.simulate.wall import kernel
kernel.NUMBERS["landlock_create_ruleset"] = (444, 444)
kernel._call("no new privileges", "prctl", 38, 1, 0, 0, 0)
kernel._seccomp([kernel.Rule("landlock_create_ruleset", 38)])  # ENOSYS
os.execv(sys.executable, [sys.executable, "-m", "dreamgym_lg.cli.app", "doctor", *sys.argv[1:]])
"""


@walls
@pytest.mark.slow
def test_the_doctor_says_the_same_where_the_kernel_has_no_landlock(app: Path) -> None:
    command = [sys.executable, "-c", NO_LANDLOCK, f"{app}:graph"]
    for option in ((), ("--json",)):
        done = subprocess.run([*command, *option], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Landlock, of Linux 5.13 or later" in " ".join(done.stdout.split())
    assert "Dreamed episodes run under a guard" in " ".join(
        subprocess.run(command, capture_output=True, text=True).stdout.split()
    )


def of_this_script(task: Task) -> Any:
    return task


@pytest.mark.slow
@walls
def test_what_would_leak_past_the_guard_is_no_reason_to_refuse_a_wall(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="no dreamed episode of this graph can be right: .*sqlite3.Connection"):
        AgentWorld(f"{app}:leaks", isolation="guard")
    world = AgentWorld(f"{app}:leaks")
    assert isinstance(world.agent(Policy(), real=False), WalledAgent)
    with pytest.raises(ConfigurationError, match="policy='gpt' is no chat model"):
        world.agent("gpt", real=False)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="payload=.*lambda.*cannot be sent.*isolation='guard'"):
        AgentWorld(f"{app}:graph", payload=lambda task: {})
    monkeypatch.setattr(of_this_script, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "of_this_script", of_this_script, raising=False)
    with pytest.raises(ConfigurationError, match="is of the script or notebook that runs, which no worker imports"):
        AgentWorld(f"{app}:graph", payload=of_this_script)


RUN = """
import asyncio
from dreamgym_lg import Environment, Task
from dreamgym_lg.types import StepResult
from dreamgym_lg.rollout import rollout
from dreamgym_lg.experiment.agent_world import AgentWorld
from langchain_core.language_models import FakeListChatModel
{before}

class Judge(Environment):
    def reset(self, task): return task.instruction
    def step(self, action): return StepResult("", 1.0, True, False, {{"success": True}})

world = AgentWorld("my_rooms.py:graph", payload=payload{options})
agent = world.agent(FakeListChatModel(responses=["done"]), real=False)
playing = rollout(agent, [Task(id="1", instruction="Rooms?", environment="rooms")], Judge, source="synthetic")
print(type(agent).__name__, asyncio.run(playing)[0].success)
"""
OF_THE_SCRIPT = "def payload(task): return {'messages': [('user', task.instruction)]}"


@walls
@pytest.mark.slow
def test_the_fix_for_a_function_of_the_script_works(app: Path) -> None:
    """The script is refused as it is; what the refusal proposes, is not."""
    (app.parent / "mine.py").write_text(OF_THE_SCRIPT)
    (app.parent / "orders.db").touch()  # which its import opens: behind the wall it makes none

    def run(before: str, options: str = "") -> tuple[int, str]:
        script = app.with_name("run.py")
        script.write_text(RUN.format(before=before, options=options))
        done = subprocess.run([sys.executable, script], cwd=app.parent, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    code, said = run(OF_THE_SCRIPT)
    assert code == 1 and "is of the script or notebook that runs" in said and "move it to a module" in said
    assert run("from mine import payload") == (0, "WalledAgent True\n")
    code, said = run(OF_THE_SCRIPT, ", isolation='guard'")
    assert code == 0 and "SimulatedAgent True" in said


def test_what_is_allowed_has_a_type(app: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"allow=\['/tmp'\]: give dreamgym_lg.simulate.Allow"):
        AgentWorld(f"{app}:graph", allow=["/tmp"])
