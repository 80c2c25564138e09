"""Further tools: what they return and take, where they come from, and the nodes that call them."""

from enum import Enum
from functools import partial
from typing import Annotated, Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, BaseToolkit, InjectedToolArg, StructuredTool, create_retriever_tool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore
from langgraph.types import Send, interrupt
from pydantic import BaseModel, Field

from zoo.base import Built, World, answered, ask, kinds, react, resumed, single, toolbox


class Room(BaseModel):
    city: str
    price: float


def typed_results(world: World) -> Built:
    """Tools that return a list of dicts, an object, a number; the node computes with them."""

    @tool
    def search(city: str) -> list[dict[str, Any]]:
        """Find rooms."""
        world.write("search", city)
        return [{"city": city, "price": 90}]

    @tool
    def book(city: str) -> Room:
        """Book a room."""
        world.write("book", city)
        return Room(city=city, price=90)

    @tool
    def count() -> int:
        """Count the rooms."""
        return 3 if world.write("count", "") else 0

    def node(state: dict) -> dict[str, Any]:
        rooms = search.invoke({"city": world.model.invoke("where").text})
        booked = book.invoke({"city": rooms[0]["city"]})
        return {"price": booked.price + rooms[0]["price"], "left": count.invoke({}) - 1, "city": booked.city}

    def expect(result: Any) -> None:
        assert result["price"] == 180 and result["left"] == 2

    answers = {"search": '[{"city": "Rome", "price": 80}]', "book": '{"city": "Rome", "price": 70}', "count": "5"}
    tools = ["search", "book", "count"]
    return Built(graph=single(node, schema=dict), payload={"price": 0}, tools=tools, answers=answers, expect=expect)


def tools_as_runnables(world: World) -> Built:
    """In a chain, for several inputs at once, mapped, and with what it is called with bound already."""
    book = toolbox(world)[0]

    def node(state: dict) -> dict[str, Any]:
        city = world.model.invoke("where").text
        asked = [{"city": city, "nights": nights} for nights in (1, 2)]
        chain = book.with_retry() | StrOutputParser()
        return {"done": [*book.batch(asked[:1]), *book.map().invoke(asked[1:]), chain.invoke(asked[0]), *book.stream(asked[1])]}

    def expect(result: Any) -> None:
        assert len(result["done"]) == 4 and all(result["done"])

    return Built(graph=single(node, schema=dict), payload={"done": []}, tools=["book"], expect=expect)


def returns_blocks(world: World) -> Built:
    """What it returns is content of several parts; the other returns nothing."""

    @tool
    def show(city: str) -> list[dict[str, str]]:
        """Show the room."""
        return [{"type": "text", "text": world.write("show", city)}]

    @tool
    def forget(city: str) -> None:
        """Forget the room."""
        world.write("forget", city)

    def expect(result: Any) -> None:
        assert result["messages"][-3].content_blocks[0]["text"] and result["messages"][-2].text == "null"

    answers = {"show": '[{"type": "text", "text": "a room"}]', "forget": "null"}
    graph = react(world.scripted(per_reply=2), [show, forget])
    return Built(graph=graph, payload=ask(), tools=["show", "forget"], answers=answers, expect=expect)


def asks_in_a_tool(world: World) -> Built:
    """The tool itself stops for a person before it acts."""

    @tool
    def book(city: str) -> str:
        """Book a room."""
        return world.write("book", f"{city} {interrupt({'booking': city})}")

    graph = react(world.model, [book], checkpointer=InMemorySaver())
    return Built(graph=graph, payload=ask(), tools=["book"], mode="sync", expect=answered(), **resumed("yes"))


def retriever_as_tool(world: World) -> Built:
    class Shelf(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            return [Document(world.write("search", query))]

    search = create_retriever_tool(Shelf(), "search", "Search the shelf.")
    return Built(graph=react(world.model, [search]), payload=ask(), tools=["search"], expect=answered())


class Desk(BaseToolkit):
    """Tools of one object, which keeps what they share."""

    world: Any
    booked: list[str] = []

    def book(self, city: str) -> str:
        """Book a room."""
        self.booked.append(city)
        return self.world.write("book", city)

    @staticmethod
    def pay(world: World, amount: float) -> str:
        return world.insert("pay", amount)

    def get_tools(self) -> list[BaseTool]:
        pay = partial(self.pay, self.world)
        return [StructuredTool.from_function(self.book), RunnableLambda(lambda given: pay(given["amount"])).as_tool(**PAY)]


PAY: Any = {"name": "pay", "description": "Pay the bill.", "arg_types": {"amount": float}}


def toolkit(world: World) -> Built:
    """Methods and partials of an object as tools."""
    graph = react(world.scripted(per_reply=2), Desk(world=world).get_tools())
    return Built(graph=graph, payload=ask(), tools=["book", "pay"], expect=answered(2))


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Guest(BaseModel):
    name: str
    age: int | None = None


def rich_arguments(world: World) -> Built:
    """Objects in objects, enums, limits, defaults, a list; one that the model never sees; the real tool gets them typed."""

    @tool(parse_docstring=True)
    def book(
        guests: list[Guest], size: Size, nights: Annotated[int, Field(ge=1)] = 2, desk: Annotated[str, InjectedToolArg] = "main"
    ) -> str:
        """Book a room.

        Args:
            guests: Who comes.
            size: Of the room.
            nights: How long.
        """
        return world.write("book", f"{guests[0].name} {size.value} {nights} {desk}")

    return Built(graph=react(world.model, [book]), payload=ask(), tools=["book"], expect=answered())


class Calls(MessagesState):
    todo: list[Any]


def tool_nodes_of_every_kind(world: World) -> Built:
    """One of a class of the user's, which is sent each call by itself; one with a wrapper, under another key of the state."""
    book, pay, _ = toolbox(world)

    class Noting(ToolNode):
        """Its name is a class of its own."""

    def approved(request: Any, execute: Any) -> Any:
        return execute(request.override(tool_call={**request.tool_call, "args": {"amount": 5, "currency": "USD"}}))

    def think(state: Calls) -> dict[str, Any]:
        return {"messages": [world.model.bind_tools([book]).invoke(state["messages"])]}

    def then(state: Calls) -> dict[str, Any]:
        return {"todo": [world.model.bind_tools([pay]).invoke("pay")]}

    graph = StateGraph(Calls).add_node("think", think).add_node("book", Noting([book])).add_node("then", then)
    graph.add_node("pay", ToolNode([pay], messages_key="todo", wrap_tool_call=approved)).add_edge(START, "think")
    graph.add_conditional_edges("think", lambda s: [Send("book", [c]) for c in s["messages"][-1].tool_calls], ["book"])
    graph.add_edge("book", "then").add_edge("then", "pay").add_edge("pay", END)

    def expect(result: Any) -> None:
        assert isinstance(result["messages"][-1], ToolMessage) and isinstance(result["todo"][-1], ToolMessage)
        assert isinstance(result["messages"][1], AIMessage)

    return Built(graph=graph.compile(), payload=ask(), tools=["book", "pay"], mode="sync", expect=expect)


def node_of_plain_code(world: World) -> Built:
    """No tool at all: a node's own code acts, and its user names the node."""
    graph = StateGraph(dict).add_node("think", lambda state: {**state, "text": world.model.invoke("where").text})
    graph.add_node("ship", lambda state: {**state, "shipped": world.write("ship", state["text"])})
    compiled = graph.add_edge(START, "think").add_edge("think", "ship").compile()

    def expect(result: Any) -> None:
        assert result["shipped"]

    answers = {"node:ship": '{"shipped": "dreamed"}'}
    return Built(graph=compiled, payload={"text": ""}, tools=["ship"], nodes=["ship"], answers=answers, expect=expect)


def store_that_embeds(world: World) -> Built:
    """Memories are found by meaning: a store with an index, whose embeddings are a provider's."""

    class Provider(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            world.asked.append("embeddings")
            return [[float(len(text)), 1.0] for text in texts]

        def embed_query(self, text: str) -> list[float]:
            return self.embed_documents([text])[0]

    store = InMemoryStore(index={"embed": Provider(), "dims": 2, "fields": ["text"]})
    store.put(("notes",), "known", {"text": "Ada likes rooms with a view"})
    world.asked.clear()
    book = toolbox(world)[0]

    def node(state: MessagesState, runtime: Runtime) -> dict[str, Any]:
        runtime.store.put(("notes",), "new", {"text": state["messages"][-1].text})
        found = runtime.store.search(("notes",), query="rooms with a view for Ada", limit=2)
        assert len(found) == 2
        booked = book.invoke({"city": "Rome", "nights": 1})
        return {"messages": [world.model.invoke(found[0].value["text"]), ("system", booked)]}

    def expect(result: Any) -> None:
        assert "production" in result["messages"][1].text or "policy" in result["messages"][1].text
        assert len(result["messages"]) == 3

    graph = single(node, store=store)
    return Built(graph=graph, payload=ask(), tools=["book"], mode="sync", expect=expect)


KINDS = kinds(
    typed_results,
    tools_as_runnables,
    returns_blocks,
    asks_in_a_tool,
    retriever_as_tool,
    toolkit,
    rich_arguments,
    tool_nodes_of_every_kind,
    node_of_plain_code,
    store_that_embeds,
)
