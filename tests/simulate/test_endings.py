"""Agents that end with a tool message: what is judged, and that their traces replay."""

import asyncio
import json
from collections.abc import Sequence
from itertools import compress
from typing import Any, TypedDict

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage, messages_to_dict
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.func import entrypoint
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel

from dreamgym_lg.actions import parse_action, render_answer
from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.simulate import SimulatedAgent
from dreamgym_lg.simulate.replay import RecordedPolicy, replay
from dreamgym_lg.traces import load_traces
from dreamgym_lg.types import Step, StepResult, Task

agents = pytest.importorskip("langchain.agents")
ToolStrategy = pytest.importorskip("langchain.agents.structured_output").ToolStrategy


@tool
def get_order(order_id: str) -> str:
    """Look up an order."""
    return f"{order_id}: delivered"


@tool(return_direct=True)
def hand_over(order_id: str) -> str:
    """Hand a document to the user."""
    return f"document of {order_id}"


class Ticket(BaseModel):
    """What becomes of the order."""

    order: str
    refunded: bool = False


class Scripted(BaseChatModel):
    """Replies in order, counted by the AI messages it is shown."""

    replies: list[AIMessage]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=tools, **kwargs)

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        turn = sum(message.type == "ai" for message in messages)
        return ChatResult(generations=[ChatGeneration(message=self.replies[turn].model_copy(update={"id": None}))])


def calling(name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"{name}-1"}])


LOOKED, TICKET = calling("get_order", order_id="A7"), calling("Ticket", order="A7", refunded=True)
HANDED, THINKING = calling("hand_over", order_id="A7"), AIMessage("<think>Is it?</think>\n\nIt is delivered.")
STRATEGIES: dict[str, Any] = {
    "structured": ([LOOKED, TICKET], {"response_format": ToolStrategy(Ticket)}),
    "structured, in the application's words": (
        [LOOKED, TICKET],
        {"response_format": ToolStrategy(Ticket, tool_message_content="Noted.")},
    ),
    "direct": ([LOOKED, HANDED], {}),
    "thinking": ([LOOKED, THINKING], {}),
}
CALLED = {"id": "c1", "type": "function", "function": {"name": "get_order", "arguments": '{"order_id": "A7"}'}}
ANSWERED = {"role": "tool", "tool_call_id": "c1", "content": "A7: delivered"}
TALK = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Which order?"},
    {"role": "user", "content": "A7."},
    {"role": "assistant", "tool_calls": [CALLED]},
    ANSWERED,
    {"role": "assistant", "content": "It is delivered."},
    {"role": "user", "content": "Thanks!"},
]
ANSWERS = {"direct": "document of A7", "thinking": "It is delivered."}


def graph_of(name: str) -> Any:
    replies, options = STRATEGIES[name]
    return agents.create_agent(Scripted(replies=replies), [get_order, hand_over], **options)


class Tools(Environment):
    """The real answers, and the judged last action."""

    judged = ""

    def reset(self, task: Task) -> str:
        return task.observation

    async def areset(self, task: Task) -> str:
        return task.observation

    def show_tools(self, tools: Any) -> None:
        pass

    def step(self, action: str) -> StepResult:
        parsed = parse_action(action)
        if isinstance(parsed, str):
            self.judged = parsed
            return StepResult("", 1.0, True, False, {"success": True})
        text = {"get_order": get_order, "hand_over": hand_over}[parsed.name].invoke(dict(parsed.arguments))
        return StepResult(text, 0.0, False, False, {})

    async def astep(self, action: str) -> StepResult:
        return self.step(action)


def is_right(name: str, answer: str) -> bool:
    return answer == ANSWERS[name] if name in ANSWERS else json.loads(answer) == {"order": "A7", "refunded": True}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_answer_is_judged(name: str) -> None:
    """It was empty where the last message is a tool's, and held the thought."""
    world, steps = Tools(), list[Step]()

    async def play() -> None:
        agent = SimulatedAgent(graph_of(name), Scripted(replies=STRATEGIES[name][0]))
        task = Task(id="t", instruction="What about order A7?", environment="desk")
        context = EpisodeContext(environment=world)  # type: ignore[arg-type]
        async for state in agent.astream({"task": task}, None, context=context, stream_mode="values"):
            steps[:] = state["steps"]

    asyncio.run(play())
    assert is_right(name, world.judged) and parse_action(steps[-1].action) == world.judged and steps[-1].terminated
    assert len(steps) == (3 if name == "direct" else 2)


class Asked(TypedDict):
    question: str
    answer: str


def without_messages() -> Any:
    def node(state: Asked) -> dict[str, str]:
        return {"answer": Scripted(replies=[]).invoke(state["question"]).text}

    return StateGraph(Asked).add_node("node", node).add_edge(START, "node").compile()


def of_functions() -> Any:
    @entrypoint()
    def agent(messages: list[Any]) -> BaseMessage:
        return Scripted(replies=[]).invoke(messages)

    return agent


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (without_messages(), {"payload": lambda task: {"question": "?"}, "read_message": lambda state: state["answer"]}),
        (of_functions(), {"payload": lambda task: [HumanMessage("?")]}),
    ],
    ids=["state without messages", "entrypoint"],
)
async def test_the_answer_of_a_graph_without_messages_is_judged(graph: Any, options: Any) -> None:
    world, policy = Tools(), Scripted(replies=[AIMessage("It is delivered.")])
    context = EpisodeContext(environment=world)  # type: ignore[arg-type]
    task = Task(id="t", instruction="What about order A7?", environment="desk")
    agent = SimulatedAgent(graph, policy, **options)
    states = [state async for state in agent.astream({"task": task}, None, context=context, stream_mode="values")]
    assert world.judged == parse_action(states[-1]["steps"][-1].action) == "It is delivered."


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "words" not in name])
def test_its_traces_are_successes_and_replay(name: str, tmp_path: Any) -> None:
    state = graph_of(name).invoke({"messages": [("user", "What about order A7?")]})
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": messages_to_dict(state["messages"]), "reward": 1}))
    (trajectory,) = load_traces(tmp_path / "traces.jsonl")
    assert trajectory.success and is_right(name, str(parse_action(trajectory.steps[-1].action)))
    replayed = asyncio.run(replay(SimulatedAgent(graph_of(name), RecordedPolicy()), trajectory))
    assert replayed.misfit is None
    assert list(replayed.actions.values()) == [step.action for step in trajectory.steps]


def test_where_the_application_ended_it_the_policy_learns_no_words(tmp_path: Any) -> None:
    """An application may stop behind a tool's answer: it is judged, and its policy did not say it."""
    messages = [{"role": "user", "content": "What about order A7?"}, {"role": "assistant", "tool_calls": [CALLED]}, ANSWERED]
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": messages, "reward": 1}))
    (trajectory,) = load_traces(tmp_path / "traces.jsonl")
    assert trajectory.success and parse_action(trajectory.steps[-1].action) == "A7: delivered"
    asked: list[str] = []
    policy = RecordedPolicy()
    replayed = asyncio.run(replay(SimulatedAgent(graph_of("thinking"), policy), trajectory, say=lambda a: asked.append(a) or a))
    assert replayed.misfit is None and asked == [trajectory.steps[0].action]


@pytest.mark.parametrize(("tool", "replays"), [("hand_over", True), ("get_order", False)])
def test_a_user_who_speaks_behind_a_tools_answer(tool: str, replays: bool, tmp_path: Any) -> None:
    """A tool returned it, or the run failed there and the graph would ask its policy again."""
    call = CALLED | {"function": CALLED["function"] | {"name": tool}}
    messages = [TALK[2], {"role": "assistant", "tool_calls": [call]}, ANSWERED, *TALK[:-1]]
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": messages, "reward": 1}))
    (trajectory,) = load_traces(tmp_path / "traces.jsonl")
    replayed = asyncio.run(replay(SimulatedAgent(graph_of("direct"), RecordedPolicy()), trajectory))
    assert [step.action for step in trajectory.steps][1] == render_answer("A7: delivered", tool=tool)
    assert (replayed.misfit is None) is replays
    assert replays or "asks its policy again after a tool's answer that the user read" in str(replayed.misfit)


def test_a_supervisor_whose_replies_no_trace_holds_is_named_as_a_cause(tmp_path: Any) -> None:
    messages = [{"role": "user", "content": "What about order A7?"}, {"role": "assistant", "tool_calls": [CALLED]}, ANSWERED]
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": messages, "reward": 1}))
    (trajectory,) = load_traces(tmp_path / "traces.jsonl")
    supervisor, graph = Scripted(replies=[]).with_structured_output(Ticket), StateGraph(MessagesState)
    graph.add_node("route", lambda state: {"messages": [supervisor.invoke(state["messages"]).order]})
    graph.add_edge(START, "route")
    replayed = asyncio.run(replay(SimulatedAgent(graph.compile(), RecordedPolicy()), trajectory))
    assert replayed.misfit is not None and "such as a supervisor, traces have to hold the replies of each" in replayed.misfit


def test_every_turn_of_a_conversation_replays(tmp_path: Any) -> None:
    """Only the first message was learned from."""
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": TALK, "reward": 1}))
    (trajectory,) = load_traces(tmp_path / "traces.jsonl")
    replayed = asyncio.run(replay(SimulatedAgent(graph_of("thinking"), RecordedPolicy()), trajectory))
    assert replayed.misfit is None and len(trajectory.steps) == 3 and trajectory.success
    assert list(replayed.actions.values()) == [step.action for step in trajectory.steps]


LEARNED = {
    "structured": ['get_order", "arguments": {"order_id": "A7"}}', 'Ticket", "arguments": {"order": "A7", "refunded": true}}'],
    "direct": [
        '{"name": "get_order", "arguments": {"order_id": "A7"}}',
        '{"name": "hand_over", "arguments": {"order_id": "A7"}}',
    ],
    "thinking": ['{"name": "get_order", "arguments": {"order_id": "A7"}}', "It is delivered."],
}
"""What a policy learns of a trace; the beginning of a reply that has to be a call is forced."""


def replies_learned(trajectory: Any, graph: Any) -> list[str]:
    from tiny_models import create_tokenizer

    from dreamgym_lg.integrations.trl.rows import replayed_rows

    tokenizer = create_tokenizer([step.action for step in trajectory.steps])
    (row,) = replayed_rows(lambda policy: SimulatedAgent(graph, policy), [trajectory], tokenizer, max_new_tokens=500)
    learned = tokenizer.decode(list(compress(row.segment.token_ids, row.segment.sampled)))
    return [reply.replace("<tool_call>", "").replace("</tool_call>", "").strip() for reply in learned.split("<|end|>")[:-1]]


@pytest.mark.parametrize("name", LEARNED)
def test_a_policy_learns_what_the_agent_said(name: str, tmp_path: Any) -> None:
    pytest.importorskip("trl")
    state = graph_of(name).invoke({"messages": [("user", "What about order A7?")]})
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": messages_to_dict(state["messages"]), "reward": 1}))
    (trajectory,) = load_traces(tmp_path / "traces.jsonl")
    assert replies_learned(trajectory, graph_of(name)) == LEARNED[name]


def test_a_policy_learns_all_turns_of_a_conversation(tmp_path: Any) -> None:
    pytest.importorskip("trl")
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": TALK, "reward": 1}))
    (trajectory,) = load_traces(tmp_path / "traces.jsonl")
    assert replies_learned(trajectory, graph_of("thinking")) == ["Which order?", *LEARNED["thinking"]]


# --- a node that words results itself -----------------------------------------------------------------------------------------


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f'Rain in "{city}", 4 °C'


@tool
def price(item: str) -> dict[str, Any]:
    """Look up a price."""
    return {"item": item, "price": 3.5}


@tool
def stock(item: str):  # type: ignore[no-untyped-def]
    """Count what is left."""
    return {"left": 2}


def worded(name: str) -> Any:
    """An agent whose node writes what its tools return as JSON, as LangGraph's examples do."""
    tools = {"weather": weather, "price": price, "stock": stock}

    def model(state: MessagesState) -> Any:
        model = Scripted(replies=[calling(name, **{next(iter(tools[name].args)): "Bari"}), AIMessage("That is it.")])
        return {"messages": [model.bind_tools(list(tools.values())).invoke(state["messages"])]}

    def act(state: MessagesState) -> Any:
        calls = state["messages"][-1].tool_calls  # type: ignore[union-attr]
        texts = [(json.dumps(tools[call["name"]].invoke(call["args"])), call) for call in calls]
        return {"messages": [ToolMessage(text, tool_call_id=call["id"], name=call["name"]) for text, call in texts]}

    graph = StateGraph(MessagesState).add_node(model).add_node(act).add_edge(START, "model").add_edge("act", "model")
    graph.add_conditional_edges("model", lambda state: "act" if state["messages"][-1].tool_calls else END)
    return graph.compile()


@pytest.mark.parametrize(("name", "is_exact"), [("weather", True), ("price", True), ("stock", False)])
def test_what_a_node_words_is_read_as_recorded_or_the_replay_says_so(name: str, is_exact: bool, tmp_path: Any) -> None:
    state = worded(name).invoke({"messages": [("user", "Tell me.")]})
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": messages_to_dict(state["messages"]), "reward": 1}))
    (trajectory,) = load_traces(tmp_path / "traces.jsonl")
    replayed = asyncio.run(replay(SimulatedAgent(worded(name), RecordedPolicy()), trajectory))
    assert replayed.misfit is None
    assert (replayed.reworded is None) == is_exact
    if not is_exact:
        text = str(state["messages"][2].content)
        assert f"{text!r} in the traces, and by {json.dumps(text)!r} here" in str(replayed.reworded)
