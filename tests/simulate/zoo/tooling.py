"""The many ways to write a tool, and to call one."""

from typing import Annotated, Any

from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool, Tool, ToolException, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, InjectedStore, ToolNode, ToolRuntime
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command
from pydantic import BaseModel, field_validator

from zoo.base import Built, World, answered, ask, kinds, react


class City(BaseModel):
    city: str


class BookingState(MessagesState):
    booked: list[str]


def returns_command(world: World) -> Built:
    """The tool reads the state and updates it by a Command."""

    @tool
    def book(city: str, state: Annotated[dict, InjectedState], tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Book a room."""
        world.write("book", f"{city} after {len(state['messages'])}")
        message = ToolMessage(f"booked {city}", tool_call_id=tool_call_id, name="book")
        return Command(update={"booked": [city], "messages": [message]})

    def expect(result: Any) -> None:
        answered()(result)
        assert len(result["booked"]) == 1

    return Built(graph=react(world.model, [book], state_schema=BookingState), payload=ask(), tools=["book"], expect=expect)


def injected_store(world: World) -> Built:
    """Two tools: the store injected, and all of the runtime. Both write to the store and to the world."""
    store = InMemoryStore()

    @tool
    def remember(fact: str, store: Annotated[BaseStore, InjectedStore()]) -> str:
        """Remember a fact."""
        store.put(("facts",), "fact", {"fact": fact})
        return world.write("remember", fact)

    @tool
    def note(text: str, runtime: ToolRuntime) -> str:
        """Write a note."""
        runtime.store.put(("facts",), "note", {"note": text, "messages": len(runtime.state["messages"])})
        return world.insert("note", f"{text} {bool(runtime.tool_call_id)}")

    def expect(result: Any) -> None:
        answered(2)(result)
        assert len(store.search(("facts",))) == 2

    graph = react(world.scripted(per_reply=2), [remember, note], store=store)
    return Built(graph=graph, payload=ask(), tools=["remember", "note"], expect=expect)


def overrides_tool_invoke(world: World) -> Built:
    """One subclass does all its work in invoke, the other in run: neither reaches BaseTool.run."""

    class Book(BaseTool):
        name: str = "book"
        description: str = "Book a room."
        args_schema: type[BaseModel] = City

        def _run(self, city: str) -> str:
            raise AssertionError("unused")

        def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> ToolMessage:
            return ToolMessage(world.write("book", input["args"]["city"]), tool_call_id=input["id"], name=self.name)

        async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> ToolMessage:
            return self.invoke(input)

    class Pay(BaseTool):
        name: str = "pay"
        description: str = "Pay the bill."

        def _run(self, amount: float) -> str:
            raise AssertionError("unused")

        def run(self, tool_input: Any, *args: Any, tool_call_id: str | None = None, **kwargs: Any) -> ToolMessage:
            return ToolMessage(world.insert("pay", tool_input["amount"]), tool_call_id=tool_call_id, name=self.name)

        async def arun(self, tool_input: Any, *args: Any, tool_call_id: str | None = None, **kwargs: Any) -> ToolMessage:
            return self.run(tool_input, tool_call_id=tool_call_id)

    graph = react(world.scripted(per_reply=2), [Book(), Pay()])
    return Built(graph=graph, payload=ask(), tools=["book", "pay"], expect=answered(2))


class FileTool(BaseTool):
    """A class of a module, with its own fields, that has _run only."""

    name: str = "book"
    description: str = "Book a room."
    args_schema: type[BaseModel] = City
    world: Any

    def _run(self, city: str, run_manager: Any = None) -> str:
        return self.world.write("book", f"{city} {run_manager is not None}")


def run_only(world: World) -> Built:
    return Built(graph=react(world.model, [FileTool(world=world)]), payload=ask(), tools=["book"], expect=answered())


def arun_only(world: World) -> Built:
    """A subclass whose _run refuses, and a subclass of that one which overrides nothing but _arun."""

    class Book(BaseTool):
        name: str = "book"
        description: str = "Book a room."

        def _run(self, city: str) -> str:
            raise NotImplementedError("async only")

        async def _arun(self, city: str) -> str:
            return world.write("book", city)

    class Pay(Book):
        name: str = "pay"

        async def _arun(self, city: str) -> str:
            return world.insert("pay", await super()._arun(city))

    graph = react(world.scripted(per_reply=2), [Book(), Pay()])
    return Built(graph=graph, payload=ask(), tools=["book", "pay"], mode="async", expect=answered(2))


def async_only(world: World) -> Built:
    @tool
    async def book(city: str) -> str:
        """Book a room."""
        return world.write("book", city)

    return Built(graph=react(world.model, [book]), payload=ask(), tools=["book"], mode="async", expect=answered())


def content_and_artifact(world: World) -> Built:
    @tool(response_format="content_and_artifact")
    def book(city: str) -> tuple[str, dict[str, Any]]:
        """Book a room."""
        return world.write("book", city), {"city": city, "price": 90}

    def expect(result: Any) -> None:
        answered()(result)
        assert result["messages"][-2].artifact["price"] == 90

    return Built(graph=react(world.model, [book]), payload=ask(), tools=["book"], expect=expect)


def failing_tools(world: World) -> Built:
    """Both act and then fail: one handled by the tool itself, one by its ToolNode."""

    @tool
    def book(city: str) -> str:
        """Book a room."""
        world.write("book", city)
        raise ToolException("no room left")

    @tool
    def pay(amount: float) -> str:
        """Pay the bill."""
        world.insert("pay", amount)
        raise ValueError("card refused")

    book.handle_tool_error = True
    tools = [book, pay]

    def expect(result: Any) -> None:
        first, second = result["messages"][-3:-1]
        assert (first.status, first.text, second.status) == ("error", "no room left", "error") and "refused" in second.text

    graph = react(world.scripted(per_reply=2), tools, tool_node=ToolNode(tools, handle_tool_errors=True))
    return Built(graph=graph, payload=ask(), tools=["book", "pay"], expect=expect)


def rejected_arguments(world: World) -> Built:
    """The tool's own validation refuses what the model sends: the tool never runs."""

    class Strict(BaseModel):
        city: str

        @field_validator("city")
        @classmethod
        def known(cls, city: str) -> str:
            raise ValueError("no such city")

    book = StructuredTool.from_function(
        lambda city: world.write("book", city), name="book", description="d", args_schema=Strict
    )

    def expect(result: Any) -> None:
        reply = result["messages"][-2]
        assert isinstance(reply, ToolMessage) and reply.status == "error" and "no such city" in reply.text

    return Built(
        graph=react(world.model, [book], tool_node=ToolNode([book], handle_tool_errors=True)), payload=ask(), expect=expect
    )


def other_tool_classes(world: World) -> Built:
    """Tool of one text, a runnable as tool, and one made of a function and a coroutine."""

    async def apay(amount: float) -> str:
        return world.insert("pay", amount)

    tools = [
        Tool(name="search", description="Search.", func=lambda query: world.write("search", query)),
        RunnableLambda(lambda given: world.write("note", given["text"])).as_tool(
            name="note", description="Write a note.", arg_types={"text": str}
        ),
        StructuredTool.from_function(
            lambda amount: world.insert("pay", amount),
            apay,
            name="pay",
            description="Pay.",
            args_schema={"type": "object", "properties": {"amount": {"type": "number"}}, "required": ["amount"]},
        ),
    ]
    graph = react(world.scripted(per_reply=3), tools)
    return Built(graph=graph, payload=ask(), tools=["search", "note", "pay"], expect=answered(3))


def tool_made_in_node(world: World) -> Built:
    """Its class does not exist before the run; called by hand with a plain dict of arguments."""

    def node(state: MessagesState) -> dict[str, Any]:
        class Late(BaseTool):
            name: str = "book"
            description: str = "Book a room."

            def _run(self, city: str) -> str:
                return world.write("book", city)

        late = Late()
        reply = world.model.bind_tools([late]).invoke(state["messages"])
        results = [ToolMessage(late.invoke(call["args"]), tool_call_id=call["id"], name="book") for call in reply.tool_calls]
        return {"messages": [reply, *results, world.model.invoke([*state["messages"], reply, *results])]}

    graph = StateGraph(MessagesState).add_node("only", node).add_edge(START, "only").compile()
    return Built(graph=graph, payload=ask(), tools=["book"], expect=answered())


def returns_directly(world: World) -> Built:
    """The tool's result ends the run: the model does not speak again. Its tool streams while it works."""

    @tool(return_direct=True)
    def book(city: str, runtime: ToolRuntime) -> str:
        """Book a room."""
        runtime.stream_writer({"progress": city})
        return world.write("book", city)

    bound = world.model.bind_tools([book])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([book]))
    graph.add_edge(START, "model")
    graph.add_edge("model", "tools")

    def expect(result: Any) -> None:
        assert [type(message) for message in result["messages"][1:]] == [AIMessage, ToolMessage]

    return Built(graph=graph.compile(), payload=ask(), tools=["book"], expect=expect)


KINDS = kinds(
    returns_command,
    injected_store,
    overrides_tool_invoke,
    run_only,
    arun_only,
    async_only,
    content_and_artifact,
    failing_tools,
    rejected_arguments,
    other_tool_classes,
    tool_made_in_node,
    returns_directly,
)
