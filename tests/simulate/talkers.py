"""Agents that talk, as users write them. Each asks which order, looks it up, asks for a yes, refunds it, and says so."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from desk_agent import desk, look_up, refund
from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    SummarizationMiddleware,
    after_model,
    before_model,
    wrap_model_call,
)
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.tools import InjectedToolCallId, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.prebuilt import InjectedState, ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, interrupt
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm
from typing_extensions import TypedDict
from zoo.models import ScriptedModel

from dreamgym_lg.actions import render_call
from dreamgym_lg.types import Task

TOOLS = [look_up, refund]


class Talker(NamedTuple):
    """An agent, what else its policy says, and the options that it needs."""

    graph: Any
    before: dict[int, list[str]] = {}
    """Further actions of the policy, before that of this number."""
    options: dict[str, Any] = {}


def model() -> ScriptedModel:
    return ScriptedModel(label="production")


def plain() -> Talker:
    return Talker(desk())


def react() -> Talker:
    return Talker(create_react_agent(model(), TOOLS, checkpointer=InMemorySaver()))


def loop_by_hand() -> Talker:
    bound = model().bind_tools(TOOLS)

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("think", think).add_node("tools", ToolNode(TOOLS))
    return Talker(
        graph.add_edge(START, "think").add_conditional_edges("think", tools_condition).add_edge("tools", "think").compile()
    )


def streams_its_reply() -> Talker:
    """A node that reads its model's stream and puts the chunks together."""
    bound = model().bind_tools(TOOLS)

    async def think(state: MessagesState) -> dict[str, Any]:
        whole: Any = None
        async for chunk in bound.astream(state["messages"]):
            whole = chunk if whole is None else whole + chunk
        return {"messages": [whole]}

    graph = StateGraph(MessagesState).add_node("think", think).add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "think").add_conditional_edges("think", tools_condition).add_edge("tools", "think")
    return Talker(graph.compile(checkpointer=InMemorySaver()))


def synchronous_middleware() -> Talker:
    """Its graph cannot be awaited: it is played in a thread."""

    @wrap_model_call
    def note(request: Any, handler: Any) -> Any:
        return handler(request)

    return Talker(desk(middleware=[note], checkpointer=InMemorySaver()))


def trims_its_history() -> Talker:
    @before_model
    def trim(state: AgentState, runtime: Any) -> dict[str, Any] | None:
        kept = state["messages"][-4:]
        while kept and kept[0].type == "tool":
            kept = kept[1:]
        return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), *kept]}

    return Talker(desk(middleware=[trim], checkpointer=InMemorySaver()))


def summarises_its_history() -> Talker:
    """LangChain's own: the summary is the policy's too."""
    middleware = SummarizationMiddleware(model(), trigger=("messages", 6), keep=("messages", 2))
    return Talker(desk(middleware=[middleware], checkpointer=InMemorySaver()), {3: ['{"answer": "W-2 is lost."}']})


def approved_by_a_person() -> Talker:
    middleware = HumanInTheLoopMiddleware(interrupt_on={"refund": True})
    return Talker(desk(middleware=[middleware], checkpointer=InMemorySaver()))


def person_in_the_graph() -> Talker:
    """LangGraph's own pattern: a node asks the person by `interrupt`, and the graph goes round."""
    agent = create_agent(model(), TOOLS)

    async def talk(state: MessagesState) -> Command:
        result = await agent.ainvoke({"messages": state["messages"]})
        return Command(update={"messages": result["messages"]}, goto="person")

    def person(state: MessagesState) -> Command:
        said = interrupt(state["messages"][-1].text)
        return Command(update={"messages": [HumanMessage(said)]}, goto="talk")

    graph = StateGraph(MessagesState).add_node("talk", talk, destinations=("person",))
    graph.add_node("person", person, destinations=("talk",))
    return Talker(graph.add_edge(START, "talk").compile(checkpointer=InMemorySaver()))


def text_of(task: Task) -> str:
    return task.instruction


def only_reply(state: Any, reply: str) -> str:
    return reply


def functional() -> Talker:
    """The functional API, whose checkpointer keeps the messages."""
    agent = create_agent(model(), TOOLS)

    @entrypoint(checkpointer=InMemorySaver())
    async def workflow(text: str, *, previous: Any = None) -> Any:
        result = await agent.ainvoke({"messages": [*(previous or []), HumanMessage(text)]})
        return entrypoint.final(value=result["messages"][-1].text, save=result["messages"])

    return Talker(workflow, options={"payload": text_of, "next_payload": only_reply, "read_message": str})


def swarm() -> Talker:
    """The second turn begins with the agent that the first one ended with."""
    alice = create_agent(model(), [look_up, create_handoff_tool(agent_name="bob")], name="alice")
    bob = create_agent(model(), [refund], name="bob")
    graph = create_swarm([alice, bob], default_active_agent="alice").compile(checkpointer=InMemorySaver())
    return Talker(graph, {2: [render_call("transfer_to_bob", {})]})


def hand_off_by_command() -> Talker:
    """LangGraph's hand-off by hand: a tool of one agent sends its parent graph to another node."""

    @tool
    def to_clerk(state: Annotated[Any, InjectedState], tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Hand over to the clerk."""
        done = ToolMessage("The clerk takes over.", tool_call_id=tool_call_id)
        return Command(goto="clerk", graph=Command.PARENT, update={"messages": [*state["messages"], done]})

    first = create_agent(model(), [look_up, to_clerk], name="first")
    graph = StateGraph(MessagesState).add_node("first", first).add_node("clerk", create_agent(model(), [refund]))
    return Talker(graph.add_edge(START, "first").compile(), {3: [render_call("to_clerk", {})]})


def supervisor() -> Talker:
    worker = create_agent(model(), TOOLS, name="clerk")
    graph = create_supervisor([worker], model=model(), output_mode="full_history", add_handoff_back_messages=False).compile()
    said = '{"answer": "The clerk has looked it up."}'
    to_clerk = render_call("transfer_to_clerk", {})
    return Talker(graph, {1: [to_clerk], 2: [said], 3: [to_clerk], 4: [said]})


class Own(TypedDict, total=False):
    talk: list[Any]


def subgraph_with_own_state() -> Talker:
    agent = create_agent(model(), TOOLS)

    async def answer(state: Own) -> Own:
        result = await agent.ainvoke({"messages": state["talk"]})
        return {"talk": result["messages"]}

    inner = StateGraph(Own).add_node("answer", answer).add_edge(START, "answer").compile()

    async def outer(state: MessagesState) -> dict[str, Any]:
        result = await inner.ainvoke({"talk": state["messages"]})
        return {"messages": result["talk"]}

    return Talker(StateGraph(MessagesState).add_node("outer", outer).add_edge(START, "outer").compile())


class Remembers:
    """No graph, but an object that runs one and keeps the messages itself."""

    def __init__(self) -> None:
        self.graph = create_agent(model(), TOOLS)

    def invoke(self, payload: Any) -> Any:
        return self.graph.invoke(payload)


def object_with_invoke() -> Talker:
    return Talker(Remembers())


def checked(state: Any) -> str:
    assert state["turns"] == sum(isinstance(message, AIMessage) for message in state["messages"])
    return str(state["messages"][-1].text)


def notes_beside_the_messages() -> Talker:
    """Its state has more than messages, and is kept without a checkpointer."""

    class Noted(AgentState, total=False):
        turns: int

    @after_model(state_schema=Noted)
    def count(state: Any, runtime: Any) -> dict[str, Any]:
        return {"turns": state.get("turns", 0) + 1}

    return Talker(create_agent(model(), TOOLS, middleware=[count]), options={"read_message": checked})


def two_stages() -> Talker:
    """A first agent finds out the order, a second one acts; routed by the messages."""
    first, second = create_agent(model(), [look_up]), create_agent(model(), [refund])

    def route(state: MessagesState) -> str:
        return "second" if any(message.type == "tool" for message in state["messages"]) else "first"

    graph = StateGraph(MessagesState).add_node("first", first).add_node("second", second)
    graph.add_conditional_edges(START, route, ["first", "second"])
    return Talker(graph.add_edge("first", END).add_edge("second", END).compile(checkpointer=InMemorySaver()))


TALKERS: list[Callable[[], Talker]] = [
    *(
        plain,
        react,
        loop_by_hand,
        streams_its_reply,
        synchronous_middleware,
        trims_its_history,
        summarises_its_history,
        approved_by_a_person,
        person_in_the_graph,
    ),
    *(functional, swarm, hand_off_by_command, supervisor),
    *(subgraph_with_own_state, object_with_invoke, notes_beside_the_messages, two_stages),
]
