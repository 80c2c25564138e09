"""Tools that return a `Command` and may act on the world: they are simulated, and the state that they write is answered too."""

import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypedDict

import pytest
from langchain.agents import AgentState, create_agent
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, InjectedToolCallId, tool
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command
from pydantic import BaseModel
from test_tools import Saying, Says
from worlds import TASK, Answers, dream
from zoo.models import ScriptedModel

from dreamgym_lg.actions import render_call
from dreamgym_lg.dream import Dream, Recorded
from dreamgym_lg.errors import ConfigurationError, PredictionFailed, Unanswered
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.simulate import return_types
from dreamgym_lg.simulate.doctor import examine
from dreamgym_lg.types import Step, Trajectory

ORDERS: list[str] = []
"""The real world: no tool writes to it in a dream."""

Id = Annotated[str, InjectedToolCallId]


class Customer(BaseModel):
    name: str
    orders: int


class Address(TypedDict):
    city: str


class State(AgentState):
    customer: Customer
    address: Address
    name: str
    tags: list[str]


@tool
def find(name: str, tool_call_id: Id, loud: bool = False) -> Command:
    """Find a customer."""
    ORDERS.append(name)
    found = Customer(name=name, orders=len(ORDERS))
    message = ToolMessage(f"found {found}", tool_call_id=tool_call_id)
    return Command(update={"customer": found, "name": name, "tags": ["found", name, f"{loud}"], "messages": [message]})


@tool
async def move(city: str, tool_call_id: Id) -> Command[Literal["after"]]:
    """Note where a customer has moved."""
    ORDERS.append(city)
    if not city:
        return Command(update={"messages": [ToolMessage("where?", tool_call_id=tool_call_id)]}, goto="after")
    new: Address = {"city": city.title()}
    return Command(update={"address": new, "messages": [ToolMessage("moved", tool_call_id=tool_call_id)]}, goto="after")


@tool
def close(tool_call_id: Id) -> Command:
    """Close the case."""
    ORDERS.append("closed")
    return Command(update={"messages": [ToolMessage("closed", tool_call_id=tool_call_id)]}, goto=END)


def asking(*tools: BaseTool) -> Any:
    """An agent that asks once; behind its tools a node reads the state."""

    def ask(state: State) -> Any:
        return {"messages": [ScriptedModel(label="production").bind_tools(list(tools)).invoke(state["messages"])]}

    graph = StateGraph(State).add_node("ask", ask).add_node("tools", ToolNode(list(tools)))
    graph.add_node("after", lambda state: {"tags": ["after"]}).add_edge(START, "ask").add_edge("ask", "tools")
    return graph.compile()


class Noting(Answers):
    def show_tools(self, tools: Any) -> None:
        self.told = {each["function"]["name"]: each["function"].get("returns") for each in tools}


FOUND = {"customer": {"name": "Ann", "orders": 3}, "messages": "found Ann, who has three orders"}


def test_the_dream_answers_the_state_that_a_tool_writes() -> None:
    world = Noting({"find": json.dumps(FOUND)})
    episode, state = dream(asking(find, move, close), Saying(says=[[("find", {"name": "Ann"})]]), world)
    assert state["customer"] == Customer(name="Ann", orders=3) and ORDERS == []
    assert (state["name"], state["tags"]) == ("Ann", ["found", "Ann", "False"]), "what follows from the arguments is not asked"
    [step] = episode.steps
    assert step.next_observation == state["messages"][-1].text == FOUND["messages"], "what the policy reads"
    assert state["messages"][-1].tool_call_id == "call_0"
    schema = world.told["find"]
    assert schema["required"] == ["customer"] and set(schema["properties"]) == {"customer", "messages"}
    assert "Customer" in schema["$defs"] and world.told["close"] is None
    assert world.told["move"].get("required") is None and "address" in world.told["move"]["properties"]


def test_an_answer_without_the_state_is_none() -> None:
    for said in ("found Ann", '{"customer": "Ann"}', '{"messages": "found Ann"}'):
        with pytest.raises(PredictionFailed, match="tool 'find' returns JSON of .*'customer'"):
            dream(asking(find), Saying(says=[[("find", {"name": "Ann"})]]), Answers({"find": said}))


def test_recordings_lack_the_state_and_the_next_responder_answers_it() -> None:
    policy = Saying(says=[[("find", {"name": "Ann"})]])
    step = Step(observation="", action=render_call("find", {"name": "Ann"}), next_observation="found Ann")
    with ReplayBuffer(":memory:") as buffer:
        buffer.add(Trajectory(task=TASK, steps=[step], success=True))
        parts = [Recorded(buffer), Says(json.dumps(FOUND))]
        episode, state = dream(asking(find), policy, Dream(parts, judges=[Says("")]).create_environment())
        assert state["customer"].orders == 3 and [step.decided_by for step in episode.steps] == ["says"]
        with pytest.raises(Unanswered, match=r"\(recorded\) answers .*recordings lack the state that this tool sets"):
            dream(asking(find), policy, Dream(parts[:1], judges=[Says("")]).create_environment())


def test_a_recorded_answer_that_is_the_state_is_taken_as_it_is() -> None:
    said = '{"customer": {"name": "Ann", "orders": 3}, "since": 2020}'
    _, state = dream(asking(find), Saying(says=[[("find", {"name": "Ann"})]]), Answers({"find": said}))
    assert state["customer"].orders == 3 and state["messages"][-1].text == said


@pytest.mark.parametrize(("said", "address"), [("Where is that?", None), ('{"address": {"city": "Rome"}}', {"city": "Rome"})])
def test_state_that_is_not_always_written_may_be_left_out_and_goto_is_kept(said: str, address: Any) -> None:
    _, state = dream(asking(move), Saying(says=[[("move", {"city": "rome"})]]), Answers({"move": said}))
    assert state.get("address") == address and state["tags"] == ["after"] and ORDERS == []
    _, state = dream(asking(close), Saying(says=[[("close", {})]]), Answers({"close": "closed"}))
    assert state["messages"][-1].text == "closed" and ORDERS == []


def test_it_holds_in_an_agent_of_langchains() -> None:
    agent = create_agent(ScriptedModel(label="production"), [find], state_schema=State)
    says = Saying(says=[[("find", {"name": "Ann"})]])
    episode, state = dream(agent, says, Answers({"find": json.dumps(FOUND)}))
    assert state["customer"].orders == 3 and len(episode.steps) == 1 and ORDERS == []


def through(update: dict[str, Any]) -> Command:
    return Command(update=update)


@tool
def helped(name: str, tool_call_id: Id) -> Command:
    """Its helper makes the Command."""
    ORDERS.append(name)
    return through({"name": name, "messages": [ToolMessage("found", tool_call_id=tool_call_id)]})


@tool
def keyed(name: str, tool_call_id: Id) -> Command:
    """Its keys are not literals."""
    ORDERS.append(name)
    key = "name"
    return Command(update={key: name, "messages": [ToolMessage("found", tool_call_id=tool_call_id)]})


@tool
def either(name: str, tool_call_id: Id) -> Command:
    """It goes to one of two nodes."""
    ORDERS.append(name)
    return Command(goto="after") if name else Command(goto=END)


@tool
def beside(name: str, tool_call_id: Id) -> list[Command | ToolMessage]:
    """Its message is beside its Command."""
    ORDERS.append(name)
    return [Command(update={"name": name}), ToolMessage("found", tool_call_id=tool_call_id)]


@pytest.mark.parametrize("made", [helped, keyed, either, beside], ids=lambda made: str(made.name))
def test_what_the_code_does_not_show_is_refused_before_the_first_episode(made: BaseTool) -> None:
    graph = asking(made)
    [part] = [part for part in examine(graph).parts if part.name == made.name]
    assert part.handling == "not simulated" and "pass_through" in part.advice
    with pytest.raises(ConfigurationError, match=f"can be right: tool {made.name} .*literal keys"):
        AgentWorld(graph)
    AgentWorld(graph, pass_through=[made.name])
    with pytest.raises(ConfigurationError, match="cannot be simulated"):
        dream(graph, Saying(says=[[(made.name, {"name": "Ann"})]]))
    assert ORDERS == []


def test_the_doctor_names_the_state_that_is_asked() -> None:
    parts = {part.name: part for part in examine(asking(find, move, close)).parts}
    assert [parts[name].handling for name in ("find", "move", "close")] == ["simulated"] * 3
    assert parts["find"].advice.endswith("the state that it writes: customer") and parts["close"].advice == ""


def test_threads_that_read_code_at_once_do_not_disturb_each_other() -> None:
    """Before Python 3.12 `ast.parse` fails at random where another thread parses too, and would stop an episode."""

    def read(_: int) -> None:
        for made in (find, move, close):
            return_types._analyse.__wrapped__(made.func or made.coroutine)

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(yielding := lambda *_: sum(range(50)))  # Python code in the middle of a parse lets another thread run
    try:
        sys.setswitchinterval(1e-6)
        gc.set_threshold(10, 2, 2)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(200)))
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(yielding)


@tool
def verify(name: str, tool_call_id: Id) -> str | Command:
    """Verify a customer."""
    ORDERS.append(name)
    if len(name) < 3:
        return f"{name} is no customer."
    done = Command(update={"name": name, "messages": [ToolMessage("verified", tool_call_id=tool_call_id)]}, goto="after")
    return done if name else "Who?"


@tool
def verify_by_text(name: str, tool_call_id: Id) -> Any:
    """Verify a customer."""
    refusal = f"{name} is no customer of {len(ORDERS)}."
    return refusal if len(name) < 3 else Command(update={"name": name})


@pytest.mark.parametrize(("answer", "name"), [("Bo is no customer.", None), ("Who?", None), ("verified", "Bo"), ("Hm.", "Bo")])
def test_a_text_that_the_code_returns_in_place_of_a_command_writes_no_state(answer: str, name: str | None) -> None:
    _, state = dream(asking(verify), Saying(says=[[("verify", {"name": "Bo"})]]), Answers({"verify": answer}))
    assert (state.get("name"), ("after" in state.get("tags", []))) == (name, name is not None)
    assert state["messages"][-1].text == answer and ORDERS == []


def test_a_tool_whose_other_answers_the_code_does_not_show_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'verify_by_text' cannot be simulated: its code does not show"):
        dream(asking(verify_by_text), Saying(says=[[("verify_by_text", {"name": "Bo"})]]), Answers())
