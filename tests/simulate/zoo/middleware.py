"""Agents of create_agent with every kind of middleware, and what else create_agent and create_react_agent offer."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NotRequired
from uuid import uuid4

from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    FilesystemFileSearchMiddleware,
    HumanInTheLoopMiddleware,
    LLMToolEmulator,
    LLMToolSelectorMiddleware,
    ModelCallLimitMiddleware,
    ModelRetryMiddleware,
    PIIMiddleware,
    ShellToolMiddleware,
    SummarizationMiddleware,
    TodoListMiddleware,
    ToolCallLimitMiddleware,
    ToolErrorMiddleware,
    after_agent,
    after_model,
    before_agent,
    before_model,
    dynamic_prompt,
    wrap_model_call,
    wrap_tool_call,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import ToolRuntime, create_react_agent
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore
from pydantic import BaseModel
from typing_extensions import TypedDict

from zoo.base import Built, World, answered, ask, kinds, resumed, single, threaded, toolbox


def built(world: World, *middleware: Any, tools: int = 1, **options: Any) -> Built:
    """An agent with this middleware and the first so many tools of the toolbox."""
    mine = list(toolbox(world)[:tools])
    agent = create_agent(world.model, mine, middleware=list(middleware), **options)
    return Built(graph=agent, payload=ask(), tools=[each.name for each in mine], expect=answered(tools))


def ends(text: str, tool_messages: int = 1) -> Callable[[Any], None]:
    """Expect so many tool messages, and a last message of the agent that holds this text."""

    def expect(result: Any) -> None:
        messages = result["messages"]
        assert isinstance(messages[-1], AIMessage) and text in messages[-1].text, messages[-1]
        assert sum(isinstance(message, ToolMessage) for message in messages) == tool_messages

    return expect


def model_call_limit(world: World) -> Built:
    """The agent is cut off after its first call."""
    made = built(world, ModelCallLimitMiddleware(run_limit=1))
    made.expect = ends("limit")
    return made


def tool_call_limit(world: World) -> Built:
    """Of two calls in one reply the second is refused."""
    world.scripted(per_reply=2)
    made = built(world, ToolCallLimitMiddleware(run_limit=1))
    made.expect = ends("done", 2)
    return made


def summarization(world: World) -> Built:
    """A model of its own sums up the history, which is long."""
    made = built(world, SummarizationMiddleware(world.production(), trigger=("messages", 6), keep=("messages", 2)))
    made.payload = {"messages": [*[("user", f"word {n}") for n in range(9)], ("user", "book a room")]}

    def expect(result: Any) -> None:
        assert len(result["messages"]) < 9 and "summary" in result["messages"][0].text and "done" in result["messages"][-1].text

    made.expect = expect
    return made


def redacts(world: World) -> Built:
    """Addresses never reach the model, nor those in a tool's result."""
    made = built(world, PIIMiddleware("email", strategy="redact", apply_to_tool_results=True))
    made.payload = ask("book a room for ada@example.org")

    def expect(result: Any) -> None:
        answered()(result)
        assert "REDACTED_EMAIL" in result["messages"][-1].text and "ada@" not in repr(result)

    made.expect = expect
    return made


def selects_tools(world: World) -> Built:
    """A first call chooses which tools the agent is shown."""
    made = built(world, LLMToolSelectorMiddleware(max_tools=1), tools=3)
    made.tools, made.expect = ["book"], answered()
    return made


def emulates_tools(world: World) -> Built:
    """A model plays the tool in production too: the tool itself never runs."""
    made = built(world, LLMToolEmulator(tools=["book"], model=world.production()))
    made.tools = ()
    return made


def model_retry(world: World) -> Built:
    """The provider fails once."""
    world.model = world.production(fails=1)
    return built(world, ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False))


def tool_error(world: World) -> Built:
    """The tool acts and fails; the middleware words its error."""

    @tool
    def book(city: str) -> str:
        """Book a room."""
        world.write("book", city)
        raise ValueError("no room left")

    agent = create_agent(world.model, [book], middleware=[ToolErrorMiddleware(lambda error, request: f"failed: {error}")])
    return Built(graph=agent, payload=ask(), tools=["book"], expect=ends("done"))


def hooks(world: World) -> Built:
    """Functions before and after the agent and each of its model calls."""
    seen = list[str]()

    @before_agent
    def begin(state: AgentState, runtime: Runtime) -> None:
        seen[:] = ["begin"]

    @before_model
    def before(state: AgentState, runtime: Runtime) -> dict[str, Any]:
        return {"messages": [("system", "book well")]}

    @after_model
    def after(state: AgentState, runtime: Runtime) -> None:
        seen.append("after")

    @after_agent
    def end(state: AgentState, runtime: Runtime) -> dict[str, Any]:
        return {"messages": [AIMessage(f"{state['messages'][-1].text} {seen} done")]}

    made = built(world, begin, before, after, end)
    made.expect = ends("['begin', 'after', 'after']")
    return made


def jumps_to_the_end(world: World) -> Built:
    """A hook ends the run as soon as something is booked."""

    @before_model(can_jump_to=["end"])
    def stop(state: AgentState, runtime: Runtime) -> dict[str, Any] | None:
        booked = isinstance(state["messages"][-1], ToolMessage)
        return {"jump_to": "end", "messages": [AIMessage("booked, done")]} if booked else None

    world.scripted(rounds=5)
    made = built(world, stop)
    made.expect = ends("booked, done")
    return made


def chooses_model_and_prompt(world: World) -> Built:
    """A second model takes over after the first tool; the prompt tells how many messages there are."""
    second = world.production()

    @wrap_model_call
    def choose(request: Any, handler: Any) -> Any:
        return handler(request.override(model=second) if len(request.messages) > 1 else request)

    @dynamic_prompt
    def prompt(request: Any) -> str:
        return f"There are {len(request.messages)} messages."

    made = built(world, choose, prompt)
    made.mode = "sync"
    return made


def wraps_tool_calls(world: World) -> Built:
    """Arguments are changed on the way in, results on the way out, asynchronously."""

    @wrap_tool_call
    async def wrapped(request: Any, handler: Any) -> Any:
        call = {**request.tool_call, "args": {**request.tool_call["args"], "city": "Rome"}}
        message = await handler(request.override(tool_call=call))
        return message.model_copy(update={"content": f"{message.text} (checked)"})

    def expect(result: Any) -> None:
        answered()(result)
        assert result["messages"][-2].text.endswith("(checked)")

    made = built(world, wrapped)
    made.mode, made.expect = "async", expect
    return made


def brings_tools_and_state(world: World) -> Built:
    """A class of the user's: its tool, its fields of the state, its hooks in both ways."""

    class Counted(AgentState):
        model_calls: NotRequired[int]

    class Counter(AgentMiddleware):
        state_schema = Counted
        tools = [toolbox(world)[1]]

        def after_model(self, state: Any, runtime: Runtime) -> dict[str, Any]:
            return {"model_calls": state.get("model_calls", 0) + 1}

        async def aafter_model(self, state: Any, runtime: Runtime) -> dict[str, Any]:
            return self.after_model(state, runtime)

    world.scripted(per_reply=2)
    made = built(world, Counter())

    def expect(result: Any) -> None:
        answered(2)(result)
        assert result["model_calls"] == 2

    made.tools, made.expect = ["book", "pay"], expect
    return made


def decided(world: World, decision: dict[str, Any], **options: Any) -> Built:
    middleware = HumanInTheLoopMiddleware(interrupt_on={"book": True})
    agent = create_agent(world.model, [toolbox(world)[0]], middleware=[middleware], checkpointer=InMemorySaver())
    return Built(graph=agent, payload=ask(), **resumed({"decisions": [decision]}), **options)


def human_edits(world: World) -> Built:
    """A person changes where the room is."""

    def expect(result: Any) -> None:
        answered()(result)
        assert "Rome" in result["messages"][-2].text

    edited = {"name": "book", "args": {"city": "Rome", "nights": 2}}
    return decided(world, {"type": "edit", "edited_action": edited}, tools=["book"], expect=expect)


def human_rejects(world: World) -> Built:
    """A person refuses: the tool never runs."""
    return decided(world, {"type": "reject", "message": "too dear"}, expect=ends("done"))


@dataclass
class Customer:
    name: str
    currency: str = "EUR"


def context_of_the_run(world: World) -> Built:
    """Who asks comes with each run; prompt and tool read it, and the tool a store too."""
    store = InMemoryStore()
    store.put(("prices",), "room", {"price": 90})

    @tool
    def book(city: str, runtime: ToolRuntime[Customer]) -> str:
        """Book a room."""
        return world.write("book", f"{city} {runtime.context.name} {runtime.store.get(('prices',), 'room').value}")

    @dynamic_prompt
    def prompt(request: Any) -> str:
        return f"You serve {request.runtime.context.name}."

    agent = create_agent(world.model, [book], middleware=[prompt], context_schema=Customer, store=store)
    return Built(graph=agent, payload=ask(), tools=["book"], expect=answered(), **threaded(context=Customer("Ada")))


def todo_list(world: World) -> Built:
    """The agent plans: its plan is state."""
    world.scripted(sequence=("write_todos", "book"))
    made = built(world, TodoListMiddleware())

    def expect(result: Any) -> None:
        answered(2)(result)
        assert result["todos"]

    made.passthrough, made.expect = ["write_todos"], expect
    return made


def searches_files(world: World) -> Built:
    """The middleware's own tools read a folder."""
    folder = world.folder.parent / f"{world.folder.name}-read"
    folder.mkdir(exist_ok=True)
    (folder / "production-pattern").write_text("production-pattern")
    world.scripted(sequence=("glob_search", "book"))
    made = built(world, FilesystemFileSearchMiddleware(root_path=str(folder), use_ripgrep=False))
    made.reads, made.expect = ["glob_search"], answered(2)
    return made


def shell(world: World) -> Built:
    """A shell that lives as long as the run, started and stopped by the middleware. The scripted model gives it no command."""
    world.scripted(sequence=("shell", "book"))
    made = built(world, ShellToolMiddleware(workspace_root=world.folder))
    made.expect = ends("done", 2)
    return made


class Booking(BaseModel):
    """What was booked."""

    city: str


class Refusal(BaseModel):
    """Why nothing was."""

    why: str


def one_of_two_formats(world: World) -> Built:
    made = built(world, response_format=ToolStrategy(Booking | Refusal))

    def expect(result: Any) -> None:
        assert isinstance(result["structured_response"], Booking)

    made.expect = expect
    return made


class Order(TypedDict, total=False):
    order: str
    reply: str


def agent_behind_another_state(world: World) -> Built:
    """The graph around the agent knows no messages."""
    agent = create_agent(world.model, [toolbox(world)[0]], name="clerk")

    def serve(state: Order) -> Order:
        return {"reply": agent.invoke(ask(state["order"]))["messages"][-1].text}

    async def aserve(state: Order) -> Order:
        return {"reply": (await agent.ainvoke(ask(state["order"])))["messages"][-1].text}

    def expect(result: Any) -> None:
        assert "a room" in result["reply"]

    return Built(graph=single(serve, aserve, Order), payload={"order": "a room"}, tools=["book"], expect=expect)


def _react_agent(world: World, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create_react_agent(world.model, list(toolbox(world)[:2]), **options)


def react_agent_hooked(world: World) -> Built:
    """Hooks around the model, and a last call that gives the answer its form."""
    agent = _react_agent(
        world.scripted(per_reply=2) and world,
        pre_model_hook=lambda state: {"llm_input_messages": state["messages"][-9:]},
        post_model_hook=lambda state: {},
        response_format=Booking,
    )

    def expect(result: Any) -> None:
        answered(2)(result)
        assert isinstance(result["structured_response"], Booking)

    return Built(graph=agent, payload=ask(), tools=["book", "pay"], expect=expect)


def react_agent_v1(world: World) -> Built:
    """All calls of a reply in one node, a prompt that is a function, and a stop before the tools."""
    world.scripted(per_reply=2)
    prompt = lambda state: [("system", "You book rooms."), *state["messages"]]  # noqa: E731
    agent = _react_agent(world, version="v1", prompt=prompt, interrupt_before=["tools"], checkpointer=InMemorySaver())

    def invoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        graph.invoke(payload, config)
        return graph.invoke(None, config)

    return Built(graph=agent, payload=ask(), tools=["book", "pay"], mode="sync", invoke=invoke, expect=answered(2))


def model_by_the_state(world: World) -> Built:
    """The agent is given a function that chooses its model."""
    tools = list(toolbox(world)[:1])
    choose = lambda state, runtime: world.model.bind_tools(tools)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agent = create_react_agent(choose, tools)
    return Built(graph=agent, payload=ask(), tools=["book"], expect=answered())


KINDS = kinds(
    model_call_limit,
    tool_call_limit,
    summarization,
    redacts,
    selects_tools,
    emulates_tools,
    model_retry,
    tool_error,
    hooks,
    jumps_to_the_end,
    chooses_model_and_prompt,
    wraps_tool_calls,
    brings_tools_and_state,
    human_edits,
    human_rejects,
    context_of_the_run,
    todo_list,
    searches_files,
    shell,
    one_of_two_formats,
    agent_behind_another_state,
    react_agent_hooked,
    react_agent_v1,
    model_by_the_state,
)
