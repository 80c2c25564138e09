"""Agents of langchain's create_agent and of deepagents."""

from typing import Any, Literal
from uuid import uuid4

from deepagents import create_deep_agent
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    HumanInTheLoopMiddleware,
    ModelFallbackMiddleware,
    TodoListMiddleware,
    ToolRetryMiddleware,
)
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import BaseModel, Field

from zoo.base import Built, World, answered, ask, kinds, toolbox


class Report(BaseModel):
    """What was booked."""

    city: str
    nights: int = Field(ge=1)
    rating: Literal["good", "bad"]


def langchain_agent(world: World) -> Built:
    book, pay, _ = toolbox(world)
    agent = create_agent(world.scripted(per_reply=2), [book, pay], system_prompt="You book rooms.", name="clerk")
    return Built(graph=agent, payload=ask(), tools=["book", "pay"], expect=answered(2))


def langchain_agent_of_functions(world: World) -> Built:
    """Tools as bare functions, one of them async: create_agent makes the tools."""

    def book(city: str) -> str:
        """Book a room."""
        return world.write("book", city)

    async def pay(amount: float) -> str:
        """Pay the bill."""
        return world.insert("pay", amount)

    agent = create_agent(world.scripted(per_reply=2), [book, pay])
    return Built(graph=agent, payload=ask(), tools=["book", "pay"], mode="async", expect=answered(2))


def tool_strategy(world: World) -> Built:
    agent = create_agent(world.model, [toolbox(world)[0]], response_format=ToolStrategy(Report))

    def expect(result: Any) -> None:
        assert isinstance(result["structured_response"], Report)

    return Built(graph=agent, payload=ask(), tools=["book"], expect=expect)


def provider_strategy(world: World) -> Built:
    agent = create_agent(world.model, [toolbox(world)[0]], response_format=ProviderStrategy(Report))

    def expect(result: Any) -> None:
        assert isinstance(result["structured_response"], Report)
        assert result["messages"][-1].text.startswith("{")

    return Built(graph=agent, payload=ask(), tools=["book"], expect=expect)


def human_approves_tools(world: World) -> Built:
    """The middleware stops before each tool call; a person approves it."""
    middleware = HumanInTheLoopMiddleware(interrupt_on={"book": True})
    agent = create_agent(world.model, list(toolbox(world)[:1]), middleware=[middleware], checkpointer=InMemorySaver())
    resume = Command(resume={"decisions": [{"type": "approve"}]})

    def invoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        assert "__interrupt__" in graph.invoke(payload, config)
        return graph.invoke(resume, config)

    async def ainvoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        assert "__interrupt__" in await graph.ainvoke(payload, config)
        return await graph.ainvoke(resume, config)

    return Built(graph=agent, payload=ask(), tools=["book"], invoke=invoke, ainvoke=ainvoke, expect=answered())


def context_editing(world: World) -> Built:
    """Three rounds; old tool results are cleared from what the model sees, not from the state."""
    edits = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=1)])
    agent = create_agent(world.scripted(rounds=3), list(toolbox(world)[:1]), middleware=[edits])
    return Built(graph=agent, payload=ask(), tools=["book"], expect=answered(3))


def retry_and_fallback_middleware(world: World) -> Built:
    """The first model always fails, the second answers; the tool fails once, after it has acted."""
    failed = list[str]()

    @tool
    def book(city: str) -> str:
        """Book a room."""
        written = world.write("book", city)
        if not failed:
            failed.append(city)
            raise TimeoutError("no answer")
        return written

    middleware = [
        ModelFallbackMiddleware(world.model),
        ToolRetryMiddleware(max_retries=2, initial_delay=0, jitter=False, backoff_factor=0),
    ]
    agent = create_agent(world.production(fails=10**6), [book], middleware=middleware)
    return Built(graph=agent, payload=ask(), tools=["book"], expect=answered())


def supervisor(world: World) -> Built:
    """A sub-agent is a tool of the supervisor: it must really run, and its own tool must not."""
    worker = create_agent(world.model, [toolbox(world)[1]], name="worker")

    @tool
    def research(topic: str) -> str:
        """Let the worker find out."""
        world.passed.append("research")
        return worker.invoke(ask(topic))["messages"][-1].text

    @tool
    async def aresearch(topic: str) -> str:
        """Let the worker find out, async."""
        world.passed.append("aresearch")
        return (await worker.ainvoke(ask(topic)))["messages"][-1].text

    agent = create_agent(world.scripted(per_reply=2), [research, aresearch], name="boss")
    passthrough = ["research", "aresearch"]
    return Built(graph=agent, payload=ask(), tools=["pay"], passthrough=passthrough, mode="async", expect=answered(2))


def supervisor_sync(world: World) -> Built:
    worker = create_agent(world.model, [toolbox(world)[1]], name="worker")

    @tool
    def research(topic: str) -> str:
        """Let the worker find out."""
        world.passed.append("research")
        return worker.invoke(ask(topic))["messages"][-1].text

    agent = create_agent(world.model, [research], name="boss")
    return Built(graph=agent, payload=ask(), tools=["pay"], passthrough=["research"], expect=answered())


def deep_agent(world: World) -> Built:
    """Planning and virtual files only change the state; the booking is real."""
    book, pay, _ = toolbox(world)
    sequence = ("write_todos", "write_file", "book", "task", "pay")
    names = [f"{label}-subagent_type" for label in ("production", "policy")]  # what a scripted model asks for
    workers = [{"name": name, "description": "pays", "system_prompt": "Pay.", "tools": [pay]} for name in names]
    model = world.scripted(sequence=sequence)
    agent = create_deep_agent(model, [book], subagents=workers, middleware=[TodoListMiddleware()])

    def expect(result: Any) -> None:
        assert result["todos"] and result["files"], result
        replies = [message.name for message in result["messages"] if isinstance(message, ToolMessage)]
        assert replies == list(sequence[:4]), replies
        assert isinstance(result["messages"][-1], AIMessage)

    passthrough = ["write_todos", "write_file", "task"]
    return Built(graph=agent, payload=ask(), tools=["book", "pay"], passthrough=passthrough, expect=expect)


KINDS = kinds(
    langchain_agent,
    langchain_agent_of_functions,
    tool_strategy,
    provider_strategy,
    human_approves_tools,
    context_editing,
    retry_and_fallback_middleware,
    supervisor,
    supervisor_sync,
    deep_agent,
)
