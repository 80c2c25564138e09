"""Kinds of state, of nodes, of control flow and of persistence that LangGraph knows, and graphs as parts of other things."""

import functools
import operator
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any
from uuid import uuid4

import numpy as np
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langchain_core.runnables import RunnableBranch, RunnableGenerator, RunnableLambda, RunnablePassthrough
from langgraph.cache.memory import InMemoryCache
from langgraph.channels import EphemeralValue, UntrackedValue
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph, add_messages
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.managed import IsLastStep, RemainingSteps
from langgraph.pregel import NodeBuilder, Pregel
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore
from langgraph.store.sqlite import SqliteStore
from langgraph.types import CachePolicy, Command, RetryPolicy, Send, interrupt
from pydantic import BaseModel, field_validator
from typing_extensions import TypedDict

from zoo.base import Built, World, answered, ask, kinds, react, resumed, single, threaded, toolbox


@dataclass
class Trip:
    city: str
    notes: Annotated[list[str], operator.add] = field(default_factory=list)


def _planned(world: World, schema: Any, payload: Any) -> Built:
    """Two nodes that read the state by attribute: a model's, and a tool's."""
    book = toolbox(world)[0]

    def think(state: Any) -> dict[str, Any]:
        return {"notes": [world.model.invoke(f"go to {state.city}").text]}

    def act(state: Any) -> dict[str, Any]:
        return {"notes": [book.invoke({"city": state.city, "nights": len(state.notes)})]}

    graph = StateGraph(schema).add_sequence([think, act]).add_edge(START, "think").compile()

    def expect(result: Any) -> None:
        assert "go to Rome" in result["notes"][0] and len(result["notes"]) == 2

    return Built(graph=graph, payload=payload, tools=["book"], expect=expect)


def dataclass_state(world: World) -> Built:
    return _planned(world, Trip, Trip("Rome"))


def pydantic_state(world: World) -> Built:
    """It validates what comes in."""

    class Checked(BaseModel):
        city: str
        notes: Annotated[list[str], operator.add] = []

        @field_validator("city")
        @classmethod
        def titled(cls, city: str) -> str:
            return city.title()

    return _planned(world, Checked, {"city": "rome"})


class Question(TypedDict):
    question: str


class Private(TypedDict):
    draft: str


class Answer(TypedDict):
    answer: str


def three_schemas(world: World) -> Built:
    """What comes in, what goes out, and what only two nodes see."""
    pay = toolbox(world)[1]

    def think(state: Question) -> Private:
        return {"draft": world.model.invoke(state["question"]).text}

    def act(state: Private) -> Answer:
        return {"answer": f"{state['draft']} {pay.invoke({'amount': 2.5, 'currency': 'EUR'})}"}

    graph = StateGraph(TypedDict("All", {"question": str, "answer": str}), input_schema=Question, output_schema=Answer)
    compiled = graph.add_node(think).add_node(act).add_edge(START, "think").add_edge("think", "act").compile()

    def expect(result: Any) -> None:
        assert list(result) == ["answer"] and "how much" in result["answer"]

    return Built(graph=compiled, payload={"question": "how much"}, tools=["pay"], expect=expect)


def commands_without_edges(world: World) -> Built:
    """Every node says itself which is next."""
    book = toolbox(world)[0]

    def think(state: MessagesState) -> Command:
        reply = world.model.bind_tools([book]).invoke(state["messages"])
        return Command(update={"messages": [reply]}, goto="act" if reply.tool_calls else END)

    def act(state: MessagesState) -> Command:
        return Command(update={"messages": [book.invoke(call) for call in state["messages"][-1].tool_calls]}, goto="think")

    graph = StateGraph(MessagesState).add_node("think", think, destinations=("act", END))
    compiled = graph.add_node("act", act, destinations=("think",)).add_edge(START, "think").compile()
    return Built(graph=compiled, payload=ask(), tools=["book"], expect=answered())


class Parts(TypedDict, total=False):
    topics: list[str]
    parts: Annotated[list[str], operator.add]
    whole: str


def commands_that_send(world: World) -> Built:
    """One node sends as many others as it finds topics; a deferred one sums up after all of them, long or short."""
    book = toolbox(world)[0]

    def plan(state: Parts) -> Command:
        return Command(goto=[Send("work", topic) for topic in state["topics"]])

    def work(topic: str) -> Parts:
        return {"parts": [book.invoke({"city": topic, "nights": 1})]}

    def tell(state: Parts) -> Parts:
        return {"whole": world.model.invoke(f"{len(state['parts'])} parts").text}

    graph = StateGraph(Parts).add_node("plan", plan, destinations=("work",)).add_node("work", work)
    graph.add_node("tell", tell, defer=True).add_edge(START, "plan").add_edge("work", "tell")

    def expect(result: Any) -> None:
        assert "2 parts" in result["whole"]

    return Built(graph=graph.compile(), payload={"topics": ["Rome", "Bonn"]}, tools=["book"], expect=expect)


def barrier(world: World) -> Built:
    """Two branches beside each other, of different length, and a node that waits for both."""
    book, pay, _ = toolbox(world)
    graph = StateGraph(Parts)
    graph.add_node("first", lambda state: {"parts": [world.model.invoke("first").text]})
    graph.add_node("booked", lambda state: {"parts": [book.invoke({"city": "Rome", "nights": 1})]})
    graph.add_node("paid", lambda state: {"parts": [pay.invoke({"amount": 1, "currency": "EUR"})]})
    graph.add_node("join", lambda state: {"whole": world.model.invoke(f"{len(state['parts'])} parts").text})
    graph.add_edge(START, "first").add_edge(START, "paid").add_edge("first", "booked").add_edge(["booked", "paid"], "join")

    def expect(result: Any) -> None:
        assert "3 parts" in result["whole"]

    return Built(graph=graph.compile(), payload={"topics": []}, tools=["book", "pay"], expect=expect)


class Kept(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    best: Annotated[float, lambda old, new: max(old, new)]
    hint: Annotated[str, EphemeralValue]
    handle: Annotated[Any, UntrackedValue]
    left: RemainingSteps
    last: IsLastStep


def channels_of_every_kind(world: World) -> Built:
    """Reducers, a value for one step, one that is never kept, managed ones; the history is thrown away on the way."""
    book = toolbox(world)[0]

    def think(state: Kept) -> Kept:
        assert state["left"] > 5 and not state["last"]
        reply = world.model.bind_tools([book]).invoke(state["messages"])
        results = [book.invoke(call) for call in reply.tool_calls]
        return {"messages": [reply, *results], "best": 2.0, "hint": "short", "handle": object}

    def forget(state: Kept) -> Kept:
        assert state["hint"] == "short" and state["handle"] is not None
        kept = state["messages"][-1].text
        return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), HumanMessage(f"so far: {kept}")], "best": 1.0}

    def tell(state: Kept) -> Kept:
        assert "hint" not in state
        return {"messages": [world.model.invoke(state["messages"])]}

    graph = StateGraph(Kept).add_sequence([think, forget, tell]).add_edge(START, "think")

    def expect(result: Any) -> None:
        assert len(result["messages"]) == 2 and result["best"] == 2.0 and "so far" in result["messages"][1].text

    payload = {**ask(), "best": 0.0}
    compiled = graph.compile(checkpointer=InMemorySaver())
    return Built(graph=compiled, payload=payload, tools=["book"], expect=expect, **threaded())


def retried_node(world: World) -> Built:
    """It fails after its tool has acted, and is tried again."""
    book, tries = toolbox(world)[0], list[int]()

    def work(state: Parts) -> Parts:
        done = book.invoke({"city": "Rome", "nights": 1})
        tries.append(1)
        if len(tries) % 2:
            raise ConnectionError("the network is away")
        return {"parts": [done, world.model.invoke("sum up").text]}

    policy = RetryPolicy(initial_interval=0, jitter=False, retry_on=ConnectionError)
    graph = StateGraph(Parts).add_node("work", work, retry_policy=policy).add_edge(START, "work").compile()

    def expect(result: Any) -> None:
        assert "sum up" in result["parts"][1]

    return Built(graph=graph, payload={"topics": []}, tools=["book"], expect=expect)


class Thinker:
    def __init__(self, world: World, suffix: str = "") -> None:
        self.world, self.suffix = world, suffix

    def __call__(self, state: Parts) -> Parts:
        return {"parts": [self.world.model.invoke(f"called{self.suffix}").text]}

    def method(self, state: Parts) -> Parts:
        return {"parts": [toolbox(self.world)[0].invoke({"city": "Rome", "nights": 1})]}

    @classmethod
    def of_class(cls, state: Parts) -> Parts:
        return {"parts": [cls.__name__]}


def nodes_of_every_callable(world: World) -> Built:
    """An object, a method, a class's method, a partial, a lambda, a runnable, and None."""
    thinker = Thinker(world)

    def given(state: Parts, word: str) -> Parts:
        return {"parts": [world.model.invoke(word).text]}

    nodes: dict[str, Any] = {"object": thinker, "method": thinker.method, "of_class": Thinker.of_class}
    nodes |= {"partial": functools.partial(given, word="given"), "lambda": lambda state: {"parts": ["lambda"]}}
    nodes["runnable"] = RunnableLambda(lambda state: "runnable") | world.model | (lambda reply: {"parts": [reply.text]})
    graph = StateGraph(Parts).add_sequence(list(nodes.items())).add_edge(START, "object").compile()

    def expect(result: Any) -> None:
        words = ["called", "book wrote", "Thinker", "given", "lambda", "runnable"]
        assert all(word in part for word, part in zip(words, result["parts"], strict=True)), result

    return Built(graph=graph, payload={"topics": []}, tools=["book"], expect=expect)


def async_generators(world: World) -> Built:
    """A node that is an async generator's runnable, and a tool that streams through it."""
    book = toolbox(world)[0]

    async def speak(states: AsyncIterator[MessagesState]) -> AsyncIterator[dict[str, Any]]:
        async for state in states:
            reply = await world.model.bind_tools([book]).ainvoke(state["messages"])
            results = [await book.ainvoke(call) for call in reply.tool_calls]
            words = [word async for word in world.model.astream([*state["messages"], reply, *results])]
            yield {"messages": [reply, *results, sum(words[1:], words[0])]}

    graph = single(RunnableGenerator(speak))
    return Built(graph=graph, payload=ask(), tools=["book"], mode="async", expect=answered())


def raw_pregel(world: World) -> Built:
    """No StateGraph: channels and nodes that are put together by hand."""
    book = toolbox(world)[0]
    think = NodeBuilder().subscribe_only("city").do(lambda city: world.model.invoke(city).text).write_to("words")
    act = NodeBuilder().subscribe_only("words").do(lambda words: f"{words} {book.invoke({'city': words, 'nights': 1})}")
    graph = Pregel(
        nodes={"think": think, "act": act.write_to("done")},
        channels={name: EphemeralValue(str) for name in ("city", "words", "done")},
        input_channels=["city"],
        output_channels=["done"],
    )

    def expect(result: Any) -> None:
        assert "Rome" in result["done"]

    return Built(graph=graph, payload={"city": "Rome"}, tools=["book"], expect=expect)


def stops_before_a_node(world: World) -> Built:
    """The graph stops before its tools; who runs it looks, changes the state, and lets it go on."""
    graph = react(world.model, [toolbox(world)[0]], checkpointer=InMemorySaver(), interrupt_before=["tools"])

    def invoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        graph.invoke(payload, config)
        state = graph.get_state(config)
        assert state.next == ("tools",)
        call = {**state.values["messages"][-1].tool_calls[0], "args": {"city": "Rome", "nights": 3}}
        changed = AIMessage("", tool_calls=[call], id=state.values["messages"][-1].id)
        return graph.invoke(None, graph.update_state(config, {"messages": [changed]}))

    def expect(result: Any) -> None:
        answered()(result)
        assert result["messages"][1].tool_calls[0]["args"]["city"] == "Rome"

    return Built(graph=graph, payload=ask(), tools=["book"], mode="sync", invoke=invoke, expect=expect)


def goes_back_in_time(world: World) -> Built:
    """A run is forked from the middle of an earlier one."""
    graph = react(world.model, [toolbox(world)[0]], checkpointer=InMemorySaver())

    def invoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        graph.invoke(payload, config)
        earlier = next(each for each in graph.get_state_history(config) if each.next == ("tools",))
        return graph.invoke(None, earlier.config)

    return Built(graph=graph, payload=ask(), tools=["book"], mode="sync", invoke=invoke, expect=answered())


def several_questions_at_once(world: World) -> Built:
    """Two branches ask a person at the same time, who answers both."""
    book = toolbox(world)[0]

    def work(topic: str) -> Parts:
        verdict = interrupt({"topic": topic})
        return {"parts": [f"{verdict} {world.model.invoke(topic).text}", book.invoke({"city": topic, "nights": 1})]}

    graph = StateGraph(Parts).add_node("work", work)
    graph.add_conditional_edges(START, lambda state: [Send("work", topic) for topic in state["topics"]], ["work"])

    def expect(result: Any) -> None:
        assert [part[:3] for part in result["parts"][::2]] == ["yes"] * 2

    ways = resumed(lambda asked: {each.id: "yes" for each in asked})
    compiled = graph.compile(checkpointer=InMemorySaver())
    return Built(graph=compiled, payload={"topics": ["Rome", "Bonn"]}, tools=["book"], expect=expect, mode="sync", **ways)


def subgraph_that_remembers(world: World) -> Built:
    """Its own checkpoints go on over the turns, called by a node of the graph around it."""
    inner = react(world.model, [toolbox(world)[0]], checkpointer=True)
    graph = StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner").compile(checkpointer=InMemorySaver())

    def invoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        graph.invoke(payload, config)
        return graph.invoke(ask("and another"), config)

    return Built(graph=graph, payload=ask(), tools=["book"], mode="sync", invoke=invoke, expect=answered(2))


def long_loop(world: World) -> Built:
    """26 calls one after the other: the graph itself says how many steps are too many."""
    graph = react(world.scripted(rounds=26), [toolbox(world)[0]]).with_config(recursion_limit=200)
    return Built(graph=graph, payload=ask(), tools=["book"], expect=answered(26))


def streams_of_every_mode(world: World) -> Built:
    """The user reads all that a graph with a subgraph can stream."""
    inner = react(world.model, [toolbox(world)[0]])
    graph = StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner").compile(checkpointer=InMemorySaver())
    modes = ["values", "updates", "messages", "custom", "tasks", "checkpoints", "debug"]

    def last(parts: list[Any]) -> Any:
        assert {mode for _, mode, _ in parts} == {*modes} - {"custom"} and any(path for path, *_ in parts)
        return [part for path, mode, part in parts if mode == "values" and not path][-1]

    def invoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        return last(list(graph.stream(payload, config, stream_mode=modes, subgraphs=True)))

    async def ainvoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        return last([part async for part in graph.astream(payload, config, stream_mode=modes, subgraphs=True)])

    return Built(graph=graph, payload=ask(), tools=["book"], invoke=invoke, ainvoke=ainvoke, expect=answered())


def graph_in_a_chain(world: World) -> Built:
    """What is served is a sequence of runnables with the graph in the middle, tried again and with a second best."""
    graph = react(world.model, [toolbox(world)[0]])
    chain = RunnablePassthrough.assign(messages=lambda given: [("user", given["question"])]) | graph
    robust = chain.with_retry(stop_after_attempt=2).with_fallbacks([RunnableLambda(lambda given: {"messages": []})])
    return Built(graph=robust, payload={"question": "a room"}, tools=["book"], expect=answered())


def graph_as_a_tool(world: World) -> Built:
    """One agent is a tool of the other, made by LangChain."""
    worker = react(world.model, [toolbox(world)[0]], name="worker")

    def last(state: MessagesState) -> str:
        world.passed.append("helper")
        return state["messages"][-1].text

    chain = RunnableLambda(lambda given: ask(given["question"])) | worker | last
    helper = chain.as_tool(name="helper", description="Ask the worker.", arg_types={"question": str})
    graph = react(world.model, [helper])
    return Built(graph=graph, payload=ask(), tools=["book"], passthrough=["helper"], expect=answered())


def runnables_as_nodes(world: World) -> Built:
    """Several runnables at once as one node: a function that returns the model, and a branch that leads to a tool."""
    book = toolbox(world)[0]
    branch = RunnableBranch((lambda state: len(state["city"]) > 3, book), RunnableLambda(lambda state: "nowhere"))
    parts = {"spoken": RunnableLambda(lambda state: state["city"]) | (lambda city: world.model), "booked": branch}
    graph = single(RunnablePassthrough.assign(**parts), schema=dict)

    def expect(result: Any) -> None:
        assert "Rome" in result["spoken"].text and "Rome" in result["booked"]

    return Built(graph=graph, payload={"city": "Rome", "nights": 1}, tools=["book"], expect=expect)


def functional_with_memory(world: World) -> Built:
    """@entrypoint that knows its last result, saves another one, asks a person, and caches and retries its tasks."""
    book = toolbox(world)[0]

    @task(retry_policy=RetryPolicy(initial_interval=0))
    def act(city: str) -> str:
        return book.invoke({"city": city, "nights": 1})

    @task(cache_policy=CachePolicy())
    def think(text: str) -> str:
        return world.model.invoke(text).text

    @entrypoint(checkpointer=InMemorySaver(), cache=InMemoryCache())
    def agent(city: str, *, previous: Any = None) -> Any:
        words = think(f"{city} after {previous}").result()
        booked = act(interrupt({"booking": city})).result()
        return entrypoint.final(value={"words": words, "booked": booked}, save=booked)

    def expect(result: Any) -> None:
        assert "Rome" in result["words"] and result["booked"]

    ways = resumed("Bonn")
    return Built(graph=agent, payload="Rome", tools=["book"], mode="sync", expect=expect, cached=True, **ways)


def writes_only_at_the_end(world: World) -> Built:
    """Checkpoints are written when the run exits; a store is read and written by namespace on the way."""
    store = InMemoryStore()
    inner = react(world.model, [toolbox(world)[0]])

    def remember(state: MessagesState, runtime: Runtime) -> dict[str, Any]:
        runtime.store.put(("users", "ada"), "said", {"said": state["messages"][-1].text})
        return {"messages": [("system", f"{len(runtime.store.search(('users',)))} notes")]}

    graph = StateGraph(MessagesState).add_node("agent", inner).add_node("remember", remember).add_edge(START, "agent")
    compiled = graph.add_edge("agent", "remember").compile(checkpointer=InMemorySaver(), store=store)

    def expect(result: Any) -> None:
        assert result["messages"][-1].text == f"{len(store.search(('users',)))} notes" and len(result["messages"]) == 5

    return Built(graph=compiled, payload=ask(), tools=["book"], mode="sync", expect=expect, **threaded(durability="exit"))


def sqlite_store(world: World) -> Built:
    """A store in a file of production's."""
    store = SqliteStore(sqlite3.connect(world.folder / "store.db", check_same_thread=False, isolation_level=None))
    store.setup()
    book = toolbox(world)[0]

    def act(state: Parts, runtime: Runtime) -> Parts:
        runtime.store.put(("rooms",), "last", {"city": "Rome"})
        found = runtime.store.get(("rooms",), "last").value["city"]
        return {"parts": [book.invoke({"city": found, "nights": 1}), world.model.invoke(found).text]}

    def expect(result: Any) -> None:
        assert "Rome" in result["parts"][1] and store.get(("rooms",), "last")

    graph = StateGraph(Parts).add_node("act", act).add_edge(START, "act").compile(store=store)
    return Built(graph=graph, payload={"topics": []}, tools=["book"], mode="sync", expect=expect)


def async_checkpoints(world: World) -> Built:
    """Checkpoints in a file, by aiosqlite: opened around each run, as its manual says."""
    graph = react(world.model, [toolbox(world)[0]])

    class Served:
        def __init__(self) -> None:
            self.graph = graph

        async def ainvoke(self, payload: Any) -> Any:
            async with AsyncSqliteSaver.from_conn_string(":memory:") as saver:
                graph = self.graph.copy(update={"checkpointer": saver})
                return await graph.ainvoke(payload, {"configurable": {"thread_id": "1"}})

    return Built(graph=Served(), payload=ask(), tools=["book"], mode="async", expect=answered())


def array_in_a_closure(world: World) -> Built:
    """A node refers to an array and to what has no truth value."""
    prices, book = np.array([90.0, 70.0]), toolbox(world)[0]

    def act(state: Parts) -> Parts:
        return {"parts": [book.invoke({"city": "Rome", "nights": int(prices.argmin())}), world.model.invoke("x").text]}

    def expect(result: Any) -> None:
        assert len(result["parts"]) == 2

    return Built(graph=single(act, schema=Parts), payload={"topics": []}, tools=["book"], expect=expect)


KINDS = kinds(
    dataclass_state,
    pydantic_state,
    three_schemas,
    commands_without_edges,
    commands_that_send,
    barrier,
    channels_of_every_kind,
    retried_node,
    nodes_of_every_callable,
    async_generators,
    raw_pregel,
    stops_before_a_node,
    goes_back_in_time,
    several_questions_at_once,
    subgraph_that_remembers,
    long_loop,
    streams_of_every_mode,
    graph_in_a_chain,
    graph_as_a_tool,
    runnables_as_nodes,
    functional_with_memory,
    writes_only_at_the_end,
    sqlite_store,
    async_checkpoints,
    array_in_a_closure,
)
