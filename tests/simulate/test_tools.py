"""Tool calls of an episode: their order, the invalid ones, and what comes back in which shape."""

import asyncio
import importlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from decimal import Decimal
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, ToolRetryMiddleware, wrap_tool_call
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool, InjectedToolArg, InjectedToolCallId, StructuredTool, Tool, tool
from langchain_openai import custom_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_config
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, ToolRuntime
from langgraph.runtime import get_runtime as own_runtime
from langgraph.types import Command, Interrupt
from pydantic import BaseModel
from worlds import TASK, Answers, dream, names
from zoo import World
from zoo.base import ask, react, toolbox
from zoo.models import ScriptedModel
from zoo.policy import ScriptedPolicy

from dreamgym_lg import user_code, with_policy
from dreamgym_lg.actions import parse_action, render_call, tool_schemas
from dreamgym_lg.dream import Answer, Dream, Episode, Recorded, Verdict
from dreamgym_lg.dream.schemas import Schemas
from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate import SimulatedAgent, object_graph, simulated
from dreamgym_lg.simulate.object_graph import changes_state_only, simulated_tools
from dreamgym_lg.simulate.return_types import state_update
from dreamgym_lg.types import Step, StepResult, Trajectory


class Saying(ScriptedPolicy):
    """Calls what `says` holds, reply by reply, and ends with a text."""

    says: list[list[tuple[str, Any]]]

    def _answer(self, messages: Any, stop: Any, kwargs: Any) -> AIMessage:
        self._asked(messages, kwargs)
        turn = sum(isinstance(message, AIMessage) for message in messages)
        if turn >= len(self.says):
            return AIMessage("policy: done")
        calls = [{"name": name, "args": args, "id": f"call_{n}"} for n, (name, args) in enumerate(self.says[turn])]
        return AIMessage("", tool_calls=calls)


def test_two_calls_of_one_id_are_both_answered(tmp_path: Path) -> None:
    """A small model's mistake, which LangGraph's own tool node lives with; the call must not wait for itself."""

    class Repeating(Saying):
        def _answer(self, messages: Any, stop: Any, kwargs: Any) -> AIMessage:
            message = super()._answer(messages, stop, kwargs)
            return AIMessage(message.content, tool_calls=[{**call, "id": "same"} for call in message.tool_calls])

    world = World(folder=tmp_path)
    calls: list[list[tuple[str, Any]]] = [[("book", {"city": "Rome"}), ("book", {"city": "Bonn"})]]
    episode, _ = dream(react(world.model, [toolbox(world)[0]]), Repeating(says=calls))
    assert len(episode.steps) == 2


def test_wrong_arguments_that_a_tool_puts_into_words_are_an_invalid_call_by_code_too(tmp_path: Path) -> None:
    @tool
    def order(count: int) -> str:
        """Order so many."""
        raise AssertionError("it must not run")

    order.handle_validation_error = True
    model = World(folder=tmp_path).model

    def node(state: MessagesState) -> dict[str, Any]:
        reply = model.bind_tools([order]).invoke(state["messages"])
        text = order.invoke(reply.tool_calls[0]["args"])
        return {"messages": [reply, ToolMessage(text, tool_call_id=reply.tool_calls[0]["id"])]}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
    episode, _ = dream(graph, Saying(says=[[("order", {"count": "many"})]]))
    assert [(step.valid, "validation error" in step.next_observation) for step in episode.steps] == [(False, True)]


# --- parallel calls -----------------------------------------------------------------------------------------------------------


class Slow(Answers):
    """The earlier a call, the longer it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.at_once = 0

    def _delay(self, action: str) -> float:
        assert self.at_once == 0, "two calls reached the world at once"
        self.at_once += 1
        return 0.02 / (1 + int(parse_action(action).arguments["number"]))  # type: ignore[union-attr]

    def step(self, action: str) -> StepResult:
        time.sleep(self._delay(action))
        self.at_once -= 1
        return super().step(action)

    async def astep(self, action: str) -> StepResult:
        await asyncio.sleep(self._delay(action))
        self.at_once -= 1
        return super().step(action)


@tool
def count(number: int) -> str:
    """Count."""
    raise AssertionError("the real tool ran")


@tool
async def acount(number: int) -> str:
    """Count."""
    raise AssertionError("the real tool ran")


@pytest.mark.parametrize("builder", [react, create_agent])
async def test_parallel_calls_reach_the_world_in_order_one_at_a_time(builder: Any, tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    says: Any = [[("count", {"number": n}) for n in range(5)], [("count", {"number": n}) for n in range(5)]]
    mixed: Any = [[(("acount", "count")[n % 2], {"number": n}) for n in range(5)]] * 2
    expected = [f"dreamed {n + 1} of count" for n in range(10)]
    episode, state = dream(builder(world.model, [count]), Saying(says=says), Slow())
    assert [step.next_observation for step in episode.steps] == expected
    assert [message.text for message in state["messages"] if isinstance(message, ToolMessage)] == expected
    assert [step.observation for step in episode.steps] == ["book a room", *expected[:-1]]
    for said, kind in ((says, [count]), (mixed, [count, acount])):
        graph = builder(world.model, kind)
        async with simulated(graph, policy=Saying(says=said), environment=Slow(), task=TASK) as again:
            await again.ainvoke(ask())
        numbers = [parse_action(step.action).arguments["number"] for step in again.steps]  # type: ignore[union-attr]
        assert numbers == [*range(5)] * 2


async def test_a_call_that_never_comes_holds_up_no_other(tmp_path: Path) -> None:
    world = World(folder=tmp_path)

    def act(state: MessagesState) -> Any:
        reply = world.model.bind_tools([count]).invoke(state["messages"])
        return {"messages": [reply, count.invoke(reply.tool_calls[1])]}

    graph = StateGraph(MessagesState).add_node("act", act).add_edge(START, "act").compile()
    episode, _ = dream(graph, Saying(says=[[("count", {"number": 0}), ("count", {"number": 1})]]))
    assert len(episode.steps) == 1


def test_a_call_that_a_person_refused_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(free: Callable[[], bool]) -> Iterator[float]:
        assert free(), "it waits for a call that was refused"
        return iter(())

    def refuse(interrupt: Interrupt) -> Any:
        return {"decisions": [{"type": "reject"} for _ in interrupt.value["action_requests"]]}

    monkeypatch.setattr("dreamgym_lg.simulate.call_order._pauses", at_once)
    world = World(folder=tmp_path)
    book, pay, _ = toolbox(world)
    asks = HumanInTheLoopMiddleware(interrupt_on={"book": True})
    graph = create_agent(world.model, [book, pay], middleware=[asks], checkpointer=InMemorySaver())
    says: Any = [[("book", {"city": "Rome", "nights": 1}), ("pay", {"amount": 1, "currency": "EUR"})]] * 2
    episode, _ = dream(graph, Saying(says=says), respond=refuse)
    assert names(episode) == ["pay", "pay"]


async def test_a_sync_call_that_would_block_the_loop_for_ever_is_an_error(tmp_path: Path) -> None:
    started = asyncio.Event()

    class Waiting(Answers):
        async def astep(self, action: str) -> StepResult:
            started.set()
            await asyncio.sleep(0.01)
            return super().step(action)

    async def node(state: dict) -> Any:
        async def late() -> Any:
            await started.wait()
            return count.invoke({"number": 2})

        return {"found": await asyncio.gather(acount.ainvoke({"number": 1}), late())}

    graph = StateGraph(dict).add_node("node", node).add_edge(START, "node").compile()
    with pytest.raises(ConfigurationError, match="call `await tool.ainvoke"):
        async with simulated(graph, policy=ScriptedPolicy(), environment=Waiting(), task=TASK) as episode:
            await episode.ainvoke({"found": None})


# --- invalid calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("builder", [react, create_agent])
async def test_invalid_calls_never_reach_the_world(builder: Any, tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    book = toolbox(world)[0]
    calls: Any = [
        [("book", {"city": "Rome", "nights": "many"}), ("fly", {}), ("book", {"city": "Rome", "nights": "2"})],
        [("book", {})],
    ]
    policy, environment = Saying(says=calls), Answers()
    real = builder(Saying(says=calls), [book]).invoke(ask())
    episode, state = dream(builder(world.model, [book]), policy, environment)
    texts = [[message.text for message in each["messages"] if isinstance(message, ToolMessage)] for each in (real, state)]
    assert texts[0][:2] == texts[1][:2] and texts[0][3] == texts[1][3], "production's own words"
    assert [step.valid for step in episode.steps] == [False, False, True, False]
    assert [step.next_observation for step in episode.steps] == texts[1] and len(environment.actions) == 1
    assert [parse_action(step.action).arguments for step in episode.steps] == [args for reply in calls for _, args in reply]  # type: ignore[union-attr]
    async with simulated(builder(world.model, [book]), policy=policy, environment=Answers(), task=TASK) as again:
        await again.ainvoke(ask())
    assert again.steps == episode.steps


def test_an_invalid_call_by_hand_is_recorded(tmp_path: Path) -> None:
    world = World(folder=tmp_path)
    book = toolbox(world)[0]

    def act(state: MessagesState) -> Any:
        try:
            book.invoke({"city": "Rome"})
        except Exception as error:
            return {"messages": [AIMessage(str(error))]}

    graph = StateGraph(MessagesState).add_node("act", act).add_edge(START, "act").compile()
    environment = Answers()
    episode, state = dream(graph, ScriptedPolicy(), environment)
    (step,) = episode.steps
    assert not step.valid and "nights" in step.next_observation == state["messages"][-1].text and environment.actions == []


# --- answers ------------------------------------------------------------------------------------------------------------------


class Bed(TypedDict):
    wide: NotRequired[bool]


@dataclass
class Flat:
    beds: list[int]


@tool
async def a_flat(city: str) -> Flat:
    """A flat."""
    raise AssertionError


@tool
async def beds(city: str) -> list[Bed]:
    """Beds: `typing`'s own TypedDict, which pydantic does not read before Python 3.12."""
    raise AssertionError


class Floors(BaseTool):
    """Floors."""

    name: str = "floors"
    description: str = "Floors."

    def _run(self, city: str) -> dict[Literal["first", "second"], Bed | None]:
        raise AssertionError


class Frame:
    """As a data frame: pydantic knows no schema of it."""


class Room(BaseModel):
    city: str
    beds: int


@tool
def a_room(city: str) -> Room:
    """A room."""
    raise AssertionError


@tool
def rooms(city: str) -> list[Room]:
    """Rooms."""
    raise AssertionError


@tool
def prices(city: str) -> dict[str, float]:
    """Prices."""
    raise AssertionError


@tool
def how_many(city: str) -> int:
    """How many."""
    raise AssertionError


@tool
def maybe(city: str) -> list[str] | None:
    """Maybe."""
    raise AssertionError


STRUCTURED = [
    (a_room, '{"city": "Rome", "beds": 2}', Room(city="Rome", beds=2)),
    (rooms, '[{"city": "Rome", "beds": 2}]', [Room(city="Rome", beds=2)]),
    (prices, '{"single":  90}', {"single": 90.0}),
    (how_many, "3", 3),
    (maybe, "null", None),
    (a_flat, '{"beds": [1, 2]}', Flat([1, 2])),
    (beds, '[{"wide": true}, {}]', [{"wide": True}, {}]),
    (Floors(), '{"first": {"wide": true}, "second": null}', {"first": {"wide": True}, "second": None}),
]


@pytest.mark.parametrize(("made", "answer", "value"), STRUCTURED, ids=[made.name for made, *_ in STRUCTURED])
def test_a_structured_tool_gives_its_structure(made: BaseTool, answer: str, value: Any, tmp_path: Path) -> None:
    found = list[Any]()
    asked = getattr(made, "coroutine", None) is not None

    def call(state: dict) -> Any:
        given = {"city": "Rome"}
        return {"found": found.append(asyncio.run(made.ainvoke(given)) if asked else made.invoke(given))}

    graph = StateGraph(dict).add_node("node", call)
    compiled = graph.add_edge(START, "node").compile()
    dream(compiled, ScriptedPolicy(), Answers({made.name: answer}), {"found": None})
    assert found == [value]
    with pytest.raises(PredictionFailed, match=f"tool '{made.name}' returns .*its dreamed answer 'two beds' is none"):
        dream(compiled, ScriptedPolicy(), Answers({made.name: "two beds"}), {"found": None})
    world = World(folder=tmp_path)
    agent = react(world.model, [made], tool_node=ToolNode([made], handle_tool_errors=True))
    if made.name in ("a_room", "rooms", "a_flat"):  # a tool node writes Python's own text of these
        assert dream(agent, ScriptedPolicy(), Answers({made.name: "two beds"}))[1]["messages"][2].text == "two beds"
    else:
        with pytest.raises(PredictionFailed):
            dream(agent, ScriptedPolicy(), Answers({made.name: "two beds"}))
    episode, state = dream(agent, ScriptedPolicy(), Answers({made.name: answer}))
    assert episode.steps[0].next_observation == state["messages"][2].text, "as the policy reads it"


@pytest.mark.parametrize("make", [custom_tool, lambda function: Tool("run", function, "Run code.")], ids=["custom", "plain"])
def test_a_tool_of_one_text_is_called_in_a_dream(make: Any, tmp_path: Path) -> None:
    """Of OpenAI's custom tools the schemas raised a KeyError, and `Schemas` refused every call of either kind."""

    def run(code: str) -> str:
        """Run code."""
        raise AssertionError("the real tool ran")

    own, world = make(run), Answers()
    episode, _ = dream(react(World(folder=tmp_path).model, [own]), Saying(says=[[("run", {"__arg1": "ls"})]]), world)
    (step,) = episode.steps
    assert (step.action, step.next_observation) == (render_call("run", {"__arg1": "ls"}), "dreamed 1 of run")
    assert world.shown == ["run"]
    task = replace(TASK, tools=tool_schemas([own]))
    assert Schemas([own]).respond(Episode(task=task, action=step.action)) is None
    refused = Schemas([own]).respond(Episode(task=task, action=render_call("run", {})))
    assert refused is not None and "__arg1: Field required" in refused.observation


@pytest.mark.parametrize("bound", [{"name": "run"}, {"custom": {"name": "run"}}], ids=["responses", "chat"])
def test_a_bound_custom_tool_is_a_function_of_one_text(bound: dict[str, Any]) -> None:
    (schema,) = tool_schemas([{"type": "custom", **bound}, {"type": "web_search"}])
    assert schema["type"] == "function" and schema["function"]["name"] == "run"
    assert schema["function"]["parameters"]["required"] == ["__arg1"]


def test_the_world_is_told_what_a_tool_returns(tmp_path: Path) -> None:
    @tool
    def frames(city: str) -> Frame:
        """What JSON cannot say is text, as a tool node writes it."""
        raise AssertionError

    class Noting(Answers):
        def show_tools(self, tools: Any) -> None:
            self.told = {each["function"]["name"]: each["function"].get("returns") for each in tools}

    world, environment = World(folder=tmp_path), Noting({"rooms": "[]", "prices": "{}"})
    policy = Saying(says=[[("frames", {"city": "Rome"}), ("rooms", {"city": "Rome"})]])
    episode, _ = dream(react(world.model, [frames, rooms, prices, toolbox(world)[0]]), policy, environment)
    assert environment.told["frames"] is None and environment.told["book"] is None
    assert environment.told["rooms"]["anyOf"][0]["type"] == "array" and "Room" in environment.told["rooms"]["$defs"]
    assert environment.told["rooms"]["anyOf"][1] == {"type": "string"}, "a tool node writes a model as text"
    assert environment.told["prices"] == {"type": "object", "additionalProperties": {"type": "number"}}
    assert names(episode) == ["frames", "rooms"] and episode.steps[0].next_observation == "dreamed 1 of frames"
    assert all("returns" not in shown["function"] for _, kwargs in policy.asked for shown in kwargs["tools"])


class Colour(Enum):
    RED = "red"


@dataclass
class Size:
    wide: int


TYPED: list[tuple[Any, Any]] = [
    (Literal["open", "closed"], "open"),
    (date, date(2026, 1, 2)),
    (UUID, UUID(int=7)),
    (Colour, Colour.RED),
    (Decimal, Decimal("1.20")),
    (Size, Size(3)),
    (Room, Room(city="Rome", beds=2)),
    (set[int], {3}),
    (list[str], ["a", "b"]),
    (dict[str, float], {"a": 1.5}),
]


def returning(kind: Any, value: Any) -> BaseTool:
    def look(city: str) -> Any:
        return value

    look.__annotations__["return"] = kind
    return StructuredTool.from_function(look, name="look", description="Look.")


class Says:
    """Answers each call, and rewards each episode."""

    name = "says"

    def __init__(self, text: str) -> None:
        self.text = text

    def respond(self, episode: Episode) -> Answer:
        return Answer(self.text)

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict:
        return Verdict(1.0, True)


@pytest.mark.parametrize(("kind", "value"), TYPED, ids=[str(getattr(kind, "__name__", kind)) for kind, _ in TYPED])
def test_a_recorded_answer_of_a_typed_tool_is_written_byte_for_byte(kind: Any, value: Any, tmp_path: Path) -> None:
    """In a dream of the trace, and where the experience model says the same."""
    tool, call = returning(kind, value), {"name": "look", "args": {"city": "Rome"}, "id": "1", "type": "tool_call"}
    real = StateGraph(MessagesState).add_node("tools", ToolNode([tool])).add_edge(START, "tools").compile()
    written = real.invoke({"messages": [AIMessage("", tool_calls=[call])]})["messages"][1].text
    agent, policy = react(World(folder=tmp_path).model, [tool]), Saying(says=[[("look", {"city": "Rome"})]])
    step = Step(observation="", action=render_call("look", {"city": "Rome"}), next_observation=written)
    with ReplayBuffer(":memory:") as buffer:
        buffer.add(Trajectory(task=TASK, steps=[step], success=True))
        for responder in (Recorded(buffer), Says(written)):
            environment = Dream([responder], judges=[Says("")]).create_environment()
            episode, state = dream(agent, policy, environment)
            assert episode.steps[0].next_observation == state["messages"][2].text == written


@pytest.mark.parametrize(("kind", "text"), [(dict[str, float], "No such city."), (Decimal, "1.20"), (list[int], "[1,  2]")])
def test_an_error_text_and_its_own_layout_stay_as_they_were_recorded(kind: Any, text: str, tmp_path: Path) -> None:
    agent = react(World(folder=tmp_path).model, [returning(kind, None)])
    step = Step(observation="", action=render_call("look", {"city": "Rome"}), next_observation=text)
    with ReplayBuffer(":memory:") as buffer:
        buffer.add(Trajectory(task=TASK, steps=[step], success=True))
        environment = Dream([Recorded(buffer)], judges=[Says("")]).create_environment()
        _, state = dream(agent, Saying(says=[[("look", {"city": "Rome"})]]), environment)
    assert state["messages"][2].text == text


def test_content_and_artifact_keep_their_shape(tmp_path: Path) -> None:
    @tool(response_format="content_and_artifact")
    def look(city: str) -> tuple[str, dict[str, Any]]:
        """Look."""
        raise AssertionError

    world = World(folder=tmp_path)
    episode, state = dream(react(world.model, [look]), ScriptedPolicy())
    message = state["messages"][2]
    assert (message.text, message.artifact, message.status) == ("dreamed 1 of look", None, "success")
    assert [step.next_observation for step in episode.steps] == ["dreamed 1 of look"]


@tool
def set_the_city(city: str, runtime: ToolRuntime) -> Command:
    """Note a city."""
    print(city)
    return Command(update={"messages": [ToolMessage(city, tool_call_id=runtime.tool_call_id)]})


class Failing(Answers):
    def step(self, action: str) -> StepResult:
        return super().step(action)._replace(info={"valid": False})


@pytest.mark.parametrize("kind", [str, dict[str, float], tuple[str, Any], Command])
def test_the_graph_knows_a_failed_call_by_its_status(kind: Any, tmp_path: Path) -> None:
    made = returning(kind, None)
    if kind == tuple[str, Any]:
        made.response_format = "content_and_artifact"
    if kind is Command:
        made = set_the_city
    agent, policy = react(World(folder=tmp_path).model, [made]), Saying(says=[[(made.name, {"city": "Rome"})]])
    for environment, status in ((Failing({made.name: "{}"}), "error"), (Answers({made.name: "{}"}), "success")):
        episode, state = dream(agent, policy, environment)
        message, [step] = state["messages"][2], episode.steps
        assert (message.text, message.status, message.tool_call_id) == ("{}", status, "call_0")
        assert step.next_observation == "{}" and step.valid == (status == "success")


def test_the_world_is_told_the_agents_system_prompt_once(tmp_path: Path) -> None:
    world, environment, silent = World(folder=tmp_path), Answers(), Answers()
    dream(create_agent(world.model, [toolbox(world)[0]], system_prompt="You book rooms."), ScriptedPolicy(), environment)
    dream(create_agent(world.model, [toolbox(world)[0]]), ScriptedPolicy(), silent)
    assert (environment.prompts, silent.prompts) == (["You book rooms."], [])


def test_the_world_is_told_the_tools_and_says_why(tmp_path: Path) -> None:
    world, environment = World(folder=tmp_path), Answers()
    episode, _ = dream(react(world.model, list(toolbox(world))), ScriptedPolicy(), environment)
    assert environment.shown == ["book", "pay", "mail"] and episode.steps[0].reasoning == "because"


# --- tools that only make a Command -------------------------------------------------------------------------------------------


def state_only(function: Any) -> bool:
    return changes_state_only(StructuredTool.from_function(function))


def test_what_only_makes_a_command_runs_and_what_may_act_is_simulated(tmp_path: Path) -> None:
    """What a tool refers to decides: a client, a file, an import, the run's context may all touch the world."""
    world = World(folder=tmp_path)

    def notes(text: str) -> Command:
        """Note."""
        return Command(update={"note": json.dumps(text)}, goto=END)

    def books(text: str) -> Command:
        """Book."""
        return Command(update={"note": world.write("books", text)})

    def opens(text: str) -> Command:
        """Open."""
        with open(tmp_path / "note", "w") as file:
            file.write(text)
        return Command(update={"note": text})

    def imports(text: str) -> Command:
        """Import."""
        import subprocess

        return Command(update={"note": subprocess.getoutput(text)})

    def asks_context(text: str, runtime: ToolRuntime) -> Command:
        """Ask."""
        return Command(update={"note": runtime.context.client.book(text)})

    def through(text: str) -> Command:
        """Act in another function."""
        return Command(update={"note": books(text)})

    def says(text: str) -> str:
        """Say."""
        return text

    assert state_only(notes)
    assert not any(map(state_only, (books, opens, imports, asks_context, through, says)))


def test_a_command_of_what_a_run_hands_in_may_act() -> None:
    """A run's config, and an injected argument that is not the graph's state, hold whatever the user put there."""

    def asks_config(text: str) -> Command:
        """Ask."""
        return Command(update={"note": get_config()["configurable"]["client"].book(text)})

    def asks_by_another_name(text: str) -> Command:
        """Ask."""
        return Command(update={"note": own_runtime(text)})

    def is_given_config(text: str, cfg: RunnableConfig) -> Command:
        """Book."""
        return Command(update={"note": cfg["configurable"]["client"].book(text)})

    def is_given_client(text: str, client: Annotated[Any, InjectedToolArg]) -> Command:
        """Book."""
        return Command(update={"note": client.book(text)})

    def reads_state(text: str, state: Annotated[dict, InjectedState], number: Annotated[str, InjectedToolCallId]) -> Command:
        """Note."""
        return Command(update={"note": state["note"] + text, "number": number})

    assert state_only(reads_state)
    assert not any(map(state_only, (asks_config, asks_by_another_name, is_given_config, is_given_client)))


class Ticket(BaseModel):
    id: str

    def save(self) -> None:
        ORDERS[self.id] = "saved"

    @property
    def link(self) -> str:
        return f"https://tickets/{self.id}"


class Desk(BaseModel):
    name: str

    @cached_property
    def client(self) -> str:
        ORDERS[self.name] = "opened"
        return self.name


class Label(BaseModel):
    text: str

    def upper(self) -> str:
        return self.text.upper()


ORDERS: dict[str, str] = {}


def test_a_command_of_an_object_whose_methods_may_act_is_simulated() -> None:
    """An active record is a pydantic model too."""

    def makes_ticket(text: str) -> Command:
        """Close."""
        Ticket(id=text).save()
        return Command(update={"note": text})

    def is_given_ticket(ticket: Ticket) -> Command:
        """Close."""
        ticket.save()
        return Command(update={"note": ticket.id})

    def is_given_tickets(tickets: list[Ticket]) -> Command:
        """Close."""
        return Command(update={"note": [each.save() for each in tickets]})

    def reads_a_client(text: str) -> Command:
        """Close."""
        return Command(update={"note": Desk(name=text).client})

    def labels(label: Label) -> Command:
        """Label."""
        return Command(update={"note": Label(text=label.upper()).upper()})

    assert state_only(labels)
    assert not any(map(state_only, (makes_ticket, is_given_ticket, is_given_tickets, reads_a_client)))


def test_a_sub_agent_behind_a_tool_is_one_wherever_its_code_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent in site-packages is the user's too."""
    (tmp_path / "installed_team.py").write_text(
        "from langchain.agents import create_agent\n"
        "from langchain_core.tools import tool\n"
        "from zoo.models import ScriptedModel\n"
        "researcher = create_agent(ScriptedModel(label='production'), [], name='researcher')\n"
        "@tool\n"
        "def research(question: str) -> str:\n"
        "    'Research.'\n"
        "    return researcher.invoke({'messages': [('user', question)]})['messages'][-1].text\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(user_code, "LIBRARIES", (*user_code.LIBRARIES, str(tmp_path)))
    research = importlib.import_module("installed_team").research
    world = World(folder=tmp_path)
    graph = create_agent(world.model, [research])
    served = with_policy(graph, Saying(says=[[("research", {"question": "?"})]]))
    (answer,) = [each.text for each in served.invoke(ask())["messages"] if isinstance(each, ToolMessage)]
    assert object_graph.runs_in_dream(research) == "a sub-agent" and not answer.startswith("production")
    assert any(getattr(each, "name", "") == "researcher" for each in object_graph.reachable(graph))


def test_a_tools_class_that_is_only_asynchronous_is_read_by_its_coroutine() -> None:
    class Handover(BaseTool):
        name: str = "hand_over"
        description: str = "Hand over."

        def _run(self) -> str:
            raise NotImplementedError

        async def _arun(self, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
            message = ToolMessage("handed over", tool_call_id=tool_call_id)
            return Command(goto="billing", graph=Command.PARENT, update={"messages": [message]})

    class Kit:
        def close(self, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
            """Close."""
            return Command(update={"status": "closed", "messages": [ToolMessage("ok", tool_call_id=tool_call_id)]})

    update = state_update(Handover())
    assert update is not None and update.goto == "billing" and update.graph == Command.PARENT
    bound = state_update(StructuredTool.from_function(Kit().close))
    assert bound is not None and [*bound.computed] == ["status"]


@pytest.mark.parametrize("status", ["success", "error"])
async def test_a_failed_real_call_is_a_step_whoever_words_the_error(status: Any) -> None:
    """The tool ran, and perhaps acted."""

    @tool
    def refund(ticket: str) -> str:
        """Refund."""
        raise TimeoutError("the bank did not answer")

    tries = list[str]()

    @tool("refund")
    def second_time(ticket: str) -> str:
        """Refund."""
        tries.append(ticket)
        if len(tries) < 2:
            raise TimeoutError
        return "refunded"

    @wrap_tool_call
    async def words(request: Any, handler: Any) -> Any:
        try:
            return await handler(request)
        except TimeoutError as error:
            return ToolMessage(f"Sorry: {error}", tool_call_id=request.tool_call["id"], name="refund", status=status)

    async def steps(*middleware: Any, refund: BaseTool = refund) -> list[tuple[str, bool]]:
        graph = create_agent(ScriptedModel(label="production"), [refund], middleware=middleware)
        policy = Saying(says=[[("refund", {"ticket": "7"})]])
        agent = SimulatedAgent(graph, policy, verify=lambda *_: 1.0, real=True)
        (episode,) = await rollout(agent, [TASK], source="real", attempts=1)
        return [(step.next_observation, step.valid) for step in episode.steps if "refund" in step.action]

    assert await steps(words) == [("Sorry: the bank did not answer", False)]
    retry = ToolRetryMiddleware(max_retries=1, initial_delay=0, on_failure="error")
    assert await steps(words, retry) == [("Sorry: the bank did not answer", False)], "one call, however often it was tried"
    assert await steps(retry, refund=second_time) == [("refunded", True)]
    assert await steps() == [("the bank did not answer", False)]


def test_all_tools_of_an_agent_are_found_although_one_holds_many_records(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    orders = {number: {"id": number, "lines": [{"sku": number}]} for number in range(10_000)}

    def book(city: str) -> str:
        """Book."""
        raise RuntimeError("no tool really runs")

    def read_order(number: int) -> str:
        """Read."""
        return str(orders[number])

    graph = create_agent(ScriptedPolicy(), list(map(tool, (book, read_order))))
    assert {each.name for each in simulated_tools(graph)[0]} == {"book", "read_order"} and not caplog.text
    monkeypatch.setattr(object_graph, "MAX_OBJECTS", 20_000)
    assert {each.name for each in simulated_tools(graph)[0]} == {"read_order"}, "or the check above shows nothing"
    assert "the agent has more than 20,000 objects: tools behind the others are not known" in caplog.text
