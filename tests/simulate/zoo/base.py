"""What every kind of the zoo is made of. Nothing in this folder knows of the library that it is there to test."""

import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command
from pydantic import BaseModel

from zoo.models import ProductionModel


@dataclass(kw_only=True)
class World:
    """The outside world of one agent: its model's provider, and a folder that real tools change."""

    folder: Path
    port: int = 0
    """Of a TCP listener on 127.0.0.1, for hostile acts."""
    effects: list[tuple[str, str]] = field(default_factory=list)
    """(tool, detail) of everything that a real tool did; `disk()` tells the same from the files."""
    passed: list[str] = field(default_factory=list)
    """Pass-through tools that really ran; these change nothing outside."""
    model_calls: int = 0
    """Calls of every production model of this world."""
    asked: list[str] = field(default_factory=list)
    """Further services of the provider that were asked, such as embeddings."""
    script: dict[str, Any] = field(default_factory=dict)
    """What `model` was told by `scripted`; a policy takes the same arguments."""
    hits: list[str] = field(default_factory=list)
    """First line of everything that the listener was sent."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model = self.production()

    def production(self, **script: Any) -> ProductionModel:
        """Another production model, counted in `model_calls`."""
        return ProductionModel(on_call=self._count, **script)

    def scripted(self, **script: Any) -> ProductionModel:
        """Replace `model`."""
        self.script, self.model = script, self.production(**script)
        return self.model

    def _count(self) -> None:
        with self._lock:
            self.model_calls += 1

    def write(self, tool_name: str, detail: Any) -> str:
        """Really append a line to a file."""
        with self._lock, (self.folder / "effects.txt").open("a") as file:
            file.write(f"{tool_name}\t{detail}\n")
            self.effects.append((tool_name, str(detail)))
        return f"{tool_name} wrote {detail}"

    def insert(self, tool_name: str, detail: Any) -> str:
        """Really add a row to a database."""
        with self._lock, closing(sqlite3.connect(self.folder / "effects.db")) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS effects (tool TEXT, detail TEXT)")
            database.execute("INSERT INTO effects VALUES (?, ?)", (tool_name, str(detail)))
            self.effects.append((tool_name, str(detail)))
        return f"{tool_name} inserted {detail}"

    def disk(self) -> list[tuple[str, str]]:
        """Every effect that can be read back from the folder, sorted."""
        text, rows = self.folder / "effects.txt", self.folder / "effects.db"
        found = [tuple(line.split("\t")) for line in text.read_text().splitlines()] if text.exists() else []
        if rows.exists():
            with closing(sqlite3.connect(rows)) as database:
                found += database.execute("SELECT tool, detail FROM effects").fetchall()
        return sorted(found)


def plain(graph: Any, payload: Any) -> Any:
    return graph.invoke(payload)


async def aplain(graph: Any, payload: Any) -> Any:
    return await graph.ainvoke(payload)


@dataclass(kw_only=True)
class Built:
    """One agent, ready to run as often as one likes."""

    graph: Any
    payload: Any
    expect: Callable[[Any], None]
    """Raises AssertionError unless the result of a plain run makes sense. It does not ask who answered."""
    tools: Sequence[str] = ()
    """Exactly the tools that a plain run calls and that change the world: to be simulated."""
    reads: Sequence[str] = ()
    """Tools called too that only read the world: to be simulated as well."""
    passthrough: Sequence[str] = ()
    """Tools called too that only delegate or keep state: they must really run."""
    mode: Literal["sync", "async", "both"] = "both"
    invoke: Callable[[Any, Any], Any] = plain
    """The user's way to run it once, to its end. Unused if `mode` is "async"."""
    ainvoke: Callable[[Any, Any], Any] = aplain
    """A coroutine function, the same. Unused if `mode` is "sync"."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """What a world says to those tools whose result is no text."""
    nodes: Sequence[str] = ()
    """Nodes of plain code that change the world: to be simulated; each counts as a tool of `tools` too."""
    cached: bool = False
    """A second run asks the model less often, because the user's cache answers."""


@dataclass(frozen=True)
class Kind:
    name: str
    build: Callable[[World], Built]


def kinds(*builders: Callable[[World], Built]) -> list[Kind]:
    return [Kind(builder.__name__, builder) for builder in builders]


def ask(text: str = "book a room") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def single(node: Any, anode: Any = None, schema: Any = MessagesState, **options: Any) -> Any:
    """A graph of this one node."""
    graph = StateGraph(schema).add_node("only", RunnableLambda(node, anode) if anode else node)
    return graph.add_edge(START, "only").compile(**options)


def threaded(**options: Any) -> dict[str, Any]:
    """`invoke` and `ainvoke` of a Built: each run is a thread of its own, as a checkpointer needs."""

    def invoke(graph: Any, payload: Any) -> Any:
        return graph.invoke(payload, {"configurable": {"thread_id": uuid4().hex}}, **options)

    async def ainvoke(graph: Any, payload: Any) -> Any:
        return await graph.ainvoke(payload, {"configurable": {"thread_id": uuid4().hex}}, **options)

    return {"invoke": invoke, "ainvoke": ainvoke}


def resumed(answer: Any) -> dict[str, Any]:
    """As `threaded`, where the run stops for a person, who gives this answer: a function of the interrupts, or a value."""

    def command(state: Any) -> Any:
        asked = state["__interrupt__"]
        return Command(resume=answer(asked) if callable(answer) else answer)

    def invoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        state = graph.invoke(payload, config)
        return graph.invoke(command(state), config) if "__interrupt__" in state else state

    async def ainvoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        state = await graph.ainvoke(payload, config)
        return await graph.ainvoke(command(state), config) if "__interrupt__" in state else state

    return {"invoke": invoke, "ainvoke": ainvoke}


class Booking(BaseModel):
    city: str
    nights: int


class Payment(BaseModel):
    amount: float
    currency: Literal["EUR", "USD"]


class Mail(BaseModel):
    to: list[str]
    urgent: bool


def toolbox(world: World) -> tuple[BaseTool, BaseTool, BaseTool]:
    """`book`, `pay` and `mail`: real tools, no two of one shape; their arguments' models are not made anew for each world."""

    @tool(args_schema=Booking)
    def book(city: str, nights: int) -> str:
        """Book a room."""
        return world.write("book", f"{city} {nights}")

    @tool(args_schema=Payment)
    def pay(amount: float, currency: Literal["EUR", "USD"]) -> str:
        """Pay the bill."""
        return world.insert("pay", f"{amount} {currency}")

    @tool(args_schema=Mail)
    def mail(to: list[str], urgent: bool) -> str:
        """Send a mail."""
        return world.write("mail", f"{to} {urgent}")

    return book, pay, mail


def react(model: BaseChatModel, tools: Sequence[BaseTool], *, tool_node: Any = None, **options: Any) -> Any:
    """The loop that everybody writes: model, tools, model."""
    bound = model.bind_tools(tools)

    def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound.invoke(state["messages"])]}

    async def acall(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(options.pop("state_schema", MessagesState))
    graph.add_node("model", RunnableLambda(call, acall))
    graph.add_node("tools", tool_node or ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(**options)


def answered(tool_messages: int = 1) -> Callable[[Any], None]:
    """Expect a state whose last message is the model's text, after so many tool messages, none of them an error."""

    def expect(result: Any) -> None:
        messages = result["messages"]
        assert isinstance(messages[-1], AIMessage) and "done" in messages[-1].text, messages[-1]
        replies = [message for message in messages if isinstance(message, ToolMessage)]
        assert len(replies) == tool_messages, replies
        assert all(reply.status == "success" and reply.text for reply in replies), replies

    return expect


def view(value: Any) -> Any:
    """A result without what differs between runs: ids of messages and of tool calls, times."""
    match value:
        case AIMessage():
            return ("ai", value.text, [(call["name"], call["args"]) for call in value.tool_calls])
        case ToolMessage():
            return ("tool", value.name, value.text, value.status, view(value.artifact))
        case BaseMessage():
            return (value.type, value.text)
        case BaseModel():
            return (type(value).__name__, view(value.model_dump()))
        case dict():
            return {key: view(item) for key, item in value.items() if key not in ("created_at", "modified_at")}
        case list() | tuple():
            return [view(item) for item in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return (type(value).__name__, view(asdict(value)))
        case _:
            return value


def signed(result: Any, label: str) -> bool:
    """Whether a model of this label wrote any of the result."""
    text = repr(view(result))
    return f"{label}:" in text or f"{label}-" in text
