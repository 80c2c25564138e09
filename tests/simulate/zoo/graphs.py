"""Hand-written graphs: their shapes, their state and the ways to run one."""

import operator
import warnings
from typing import Annotated, Any, Literal, TypedDict
from uuid import uuid4

from langchain_core.messages import AIMessage, ToolMessage, trim_messages
from langchain_core.runnables import RunnableGenerator
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolRuntime, create_react_agent
from langgraph.types import Command, Send, interrupt

from zoo.base import Built, World, answered, ask, kinds, react, toolbox


class Fan(TypedDict, total=False):
    topics: list[str]
    topic: str
    parts: Annotated[list[str], operator.add]
    whole: str


def react_agent(world: World) -> Built:
    """Deprecated, and everywhere."""
    book, pay, _ = toolbox(world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agent = create_react_agent(world.scripted(per_reply=2), [book, pay], prompt="You book rooms.")
    return Built(graph=agent, payload=ask(), tools=["book", "pay"], expect=answered(2))


def closures(world: World) -> Built:
    """The nodes close over the model and the tools; every tool is called by name, by hand."""
    tools = {made.name: made for made in toolbox(world)}
    bound = world.scripted(per_reply=3).bind_tools(list(tools.values()))

    def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [bound.invoke(state["messages"])]}

    def act(state: MessagesState) -> dict[str, Any]:
        return {"messages": [tools[call["name"]].invoke(call) for call in state["messages"][-1].tool_calls]}

    def route(state: MessagesState) -> Literal["act", "__end__"]:
        return "act" if state["messages"][-1].tool_calls else END

    graph = StateGraph(MessagesState).add_node("think", think).add_node("act", act)
    graph.add_edge(START, "think").add_conditional_edges("think", route).add_edge("act", "think")
    return Built(graph=graph.compile(), payload=ask(), tools=list(tools), expect=answered(3))


def while_loop(world: World) -> Built:
    """No ToolNode: one node loops, and gives each call to the tool itself."""

    @tool
    def book(city: str) -> str:
        """Book a room."""
        return world.write("book", city)

    def node(state: MessagesState) -> dict[str, Any]:
        bound, messages = world.model.bind_tools([book]), list(state["messages"])
        while True:
            messages.append(bound.invoke(messages))
            if not messages[-1].tool_calls:
                return {"messages": messages}
            messages += [book.invoke(call) for call in messages[-1].tool_calls]

    world.scripted(rounds=2)
    graph = StateGraph(MessagesState).add_node("only", node).add_edge(START, "only").compile()
    return Built(graph=graph, payload=ask(), tools=["book"], expect=answered(2))


def object_with_invoke(world: World) -> Built:
    """No graph to be seen: an object of the user's, which holds one."""

    class Agent:
        def __init__(self) -> None:
            self._graph = react(world.model, [toolbox(world)[0]])

        def invoke(self, question: str) -> str:
            return self._graph.invoke(ask(question))["messages"][-1].text

        async def ainvoke(self, question: str) -> str:
            return (await self._graph.ainvoke(ask(question)))["messages"][-1].text

    def expect(result: Any) -> None:
        assert "a quiet room" in result

    return Built(graph=Agent(), payload="a quiet room", tools=["book"], expect=expect)


def nested_subgraphs(world: World) -> Built:
    """Two deep, once as node and once called in a node."""
    inner = react(world.model, [toolbox(world)[0]])
    middle = StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner").compile()

    def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": middle.invoke(state)["messages"]}

    outer = StateGraph(MessagesState).add_node("middle", call).add_edge(START, "middle").compile()
    return Built(graph=outer, payload=ask(), tools=["book"], expect=answered())


def send_fan_out(world: World) -> Built:
    """Three workers at once, each with a model and a tool; then one summary."""
    book = toolbox(world)[0]

    def work(state: Fan) -> dict[str, Any]:
        message = world.model.bind_tools([book]).invoke(f"book in {state['topic']}")
        results = [book.invoke(call).text for call in message.tool_calls]
        return {"parts": results + [world.model.invoke(state["topic"]).text]}

    def summarise(state: Fan) -> dict[str, Any]:
        return {"whole": world.model.invoke(" ".join(state["parts"])).text}

    graph = StateGraph(Fan).add_node("work", work).add_node("summarise", summarise)
    graph.add_conditional_edges(START, lambda state: [Send("work", {"topic": topic}) for topic in state["topics"]], ["work"])
    graph.add_edge("work", "summarise")

    def expect(result: Any) -> None:
        assert len(result["parts"]) == 6
        assert all(topic in result["whole"] for topic in ("north", "south", "west"))

    payload = {"topics": ["north", "south", "west"]}
    return Built(graph=graph.compile(), payload=payload, tools=["book"], expect=expect)


def swarm(world: World) -> Built:
    """Two agents; the first hands over by a tool that returns Command(goto=...) to the parent graph."""

    @tool
    def transfer_to_bob(
        state: Annotated[dict, InjectedState], tool_call_id: Annotated[str, InjectedToolCallId]
    ) -> Command[Literal["bob"]]:
        """Hand over to Bob."""
        world.passed.append("transfer_to_bob")
        message = ToolMessage("over to Bob", tool_call_id=tool_call_id, name="transfer_to_bob")
        return Command(goto="bob", graph=Command.PARENT, update={"messages": [*state["messages"], message]})

    alice, bob = react(world.model, [transfer_to_bob]), react(world.model, [toolbox(world)[0]])
    graph = StateGraph(MessagesState).add_node("alice", alice, destinations=("bob",)).add_node("bob", bob)
    compiled = graph.add_edge(START, "alice").compile()
    passthrough = ["transfer_to_bob"]
    return Built(graph=compiled, payload=ask(), tools=["book"], passthrough=passthrough, expect=answered(2))


class Ticket(MessagesState):
    status: str


def sets_state(world: World) -> Built:
    """A tool that notes a field of the state by `Command(update=...)`, which the next node reads."""

    @tool
    def record_status(status: str, runtime: ToolRuntime) -> Command:
        """Note the warranty's status."""
        message = ToolMessage(f"Noted {status}", tool_call_id=runtime.tool_call_id)
        return Command(update={"messages": [message], "status": status})

    agent = react(world.scripted(per_reply=2), [record_status, toolbox(world)[0]], state_schema=Ticket)
    graph = StateGraph(Ticket).add_node("agent", agent)
    graph.add_node("close", lambda state: {"messages": [("ai", f"{state['messages'][-1].text} {state['status']} done")]})
    compiled = graph.add_edge(START, "agent").add_edge("agent", "close").compile()
    return Built(graph=compiled, payload=ask(), tools=["book"], expect=answered(2))


def sliding_window(world: World) -> Built:
    """A long history, of which the model only sees the end."""
    tools = [toolbox(world)[0]]
    window = trim_messages(strategy="last", max_tokens=5, token_counter=len, start_on="human", include_system=True)
    bound = window | world.model.bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("act", lambda state: {"messages": [tools[0].invoke(call) for call in state["messages"][-1].tool_calls]})
    graph.add_edge(START, "model").add_edge("act", "model")
    graph.add_conditional_edges("model", lambda state: "act" if state["messages"][-1].tool_calls else END, ["act", END])
    history = [{"role": role, "content": f"{role} {n}"} for n in range(9) for role in ("user", "assistant")]
    payload = {"messages": [*history, {"role": "user", "content": "book a room"}]}
    return Built(graph=graph.compile(), payload=payload, tools=["book"], expect=answered())


def raw_interrupt(world: World) -> Built:
    """A node asks a person, after the tool and before the last word."""
    book = toolbox(world)[0]

    def node(state: MessagesState) -> dict[str, Any]:
        reply = world.model.bind_tools([book]).invoke(state["messages"])
        return {"messages": [reply, *(book.invoke(call) for call in reply.tool_calls)]}

    def review(state: MessagesState) -> dict[str, Any]:
        verdict = interrupt({"question": "good?"})
        return {"messages": [("system", f"the person says {verdict}"), world.model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("node", node).add_node("review", review)
    compiled = graph.add_edge(START, "node").add_edge("node", "review").compile(checkpointer=InMemorySaver())

    def invoke(graph: Any, payload: Any) -> Any:
        config = {"configurable": {"thread_id": uuid4().hex}}
        assert graph.invoke(payload, config)["__interrupt__"][0].value == {"question": "good?"}
        return graph.invoke(Command(resume="yes"), config)

    def expect(result: Any) -> None:
        answered()(result)
        assert result["messages"][-2].text.startswith("the person says ")

    return Built(graph=compiled, payload=ask(), tools=["book"], mode="sync", invoke=invoke, expect=expect)


def writes_stream(world: World) -> Built:
    """A node that streams words of its own, and a generator as node. The user reads the stream."""
    book = toolbox(world)[0]

    def act(state: MessagesState) -> dict[str, Any]:
        get_stream_writer()({"status": "thinking"})
        reply = world.model.bind_tools([book]).invoke(state["messages"])
        return {"messages": [reply, *(book.invoke(call) for call in reply.tool_calls)]}

    def speak(states: Any) -> Any:
        for state in states:
            *chunks, last = world.model.stream(state["messages"])
            yield {"messages": [sum(chunks[1:], chunks[0]) + last]}

    graph = StateGraph(MessagesState).add_node("act", act).add_node("speak", RunnableGenerator(speak))
    compiled = graph.add_edge(START, "act").add_edge("act", "speak").compile()

    def invoke(graph: Any, payload: Any) -> Any:
        parts = list(graph.stream(payload, stream_mode=["custom", "messages", "values"]))
        assert ("custom", {"status": "thinking"}) in parts
        assert any(mode == "messages" and part[0].text for mode, part in parts)
        return parts[-1][1]

    return Built(graph=compiled, payload=ask(), tools=["book"], mode="sync", invoke=invoke, expect=answered())


def graph_events(world: World) -> Built:
    """The user runs the whole graph by its event stream: v3, or v2 asynchronously."""

    def invoke(graph: Any, payload: Any) -> Any:
        return graph.stream_events(payload, version="v3").output

    async def ainvoke(graph: Any, payload: Any) -> Any:
        events = [event async for event in graph.astream_events(payload, version="v2")]
        assert {"on_chat_model_end", "on_tool_end"} <= {event["event"] for event in events}
        return events[-1]["data"]["output"]

    graph = react(world.model, [toolbox(world)[0]])
    return Built(graph=graph, payload=ask(), tools=["book"], invoke=invoke, ainvoke=ainvoke, expect=answered())


def batch_of_runs(world: World) -> Built:
    """The same graph three times at once."""
    graph = react(world.model, [toolbox(world)[0]])

    def expect(result: Any) -> None:
        assert [isinstance(run["messages"][-1], AIMessage) for run in result] == [True] * 3
        assert [f"room {n}" in run["messages"][-1].text for n, run in enumerate(result)] == [True] * 3

    async def ainvoke(graph: Any, payload: Any) -> Any:
        return await graph.abatch(payload)

    return Built(
        graph=graph,
        payload=[ask(f"room {n}") for n in range(3)],
        tools=["book"],
        invoke=lambda graph, payload: graph.batch(payload),
        ainvoke=ainvoke,
        expect=expect,
    )


KINDS = kinds(
    react_agent,
    closures,
    while_loop,
    object_with_invoke,
    nested_subgraphs,
    send_fan_out,
    swarm,
    sets_state,
    sliding_window,
    raw_interrupt,
    writes_stream,
    graph_events,
    batch_of_runs,
)
