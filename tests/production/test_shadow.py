"""A policy beside production: production is as it was, the policy's tools never run, and what both did is compared."""

import asyncio
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import pytest
from desk import Desk, Model, ask, broken, call, careful, in_thread, policy, rash, turn
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt
from typing_extensions import TypedDict

from dreamgym_lg import ReplayBuffer, load_traces
from dreamgym_lg.dream.model import Model as ExperienceModel
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.production import CanaryLog, Pair, shadow, wait_for_shadows

MODES: list[Any] = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints"]


def only_pair(log: Path, name: str | None = None) -> Pair:
    (pair,), dropped = CanaryLog(log).pairs(name)
    assert not dropped
    return pair


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_policy_that_acts_alike_agrees_and_nothing_is_done_twice(asynchronous: bool, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    graph = shadow(desk.graph, policy(careful), log=tmp_path / "log.db")
    if asynchronous:
        state = await graph.ainvoke(ask("A1"), in_thread(1))
    else:
        state = await asyncio.to_thread(graph.invoke, ask("A1"), in_thread(1))
    assert state["messages"][-1].text == "Order A1: cancelled"
    assert await asyncio.to_thread(wait_for_shadows, graph, 30)
    pair = only_pair(tmp_path / "log.db")
    assert (pair.thread, pair.status) == ("1", "compared")
    assert (pair.same_calls, pair.same_writes, pair.same_answer) == (True, True, True)
    assert pair.details == {"answered_by": {"this run": 2}}
    assert desk.cancelled == [("A1", "asked for")], "once, by production"


def test_a_policy_that_writes_what_production_does_not_is_found_out_and_stopped(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    graph = shadow(desk.graph, policy(rash), log=tmp_path / "log.db")
    assert graph.invoke(ask("A2"), in_thread(1))["messages"][-1].text == "Order A2: shipped"
    assert wait_for_shadows(graph, 30)
    pair = only_pair(tmp_path / "log.db")
    assert (pair.status, pair.same_calls, pair.same_writes, pair.same_answer) == ("unanswered", False, False, None)
    assert pair.details["only_real"] == ["get_order"] and pair.details["only_simulated"] == ["cancel_order"]
    assert desk.cancelled == []


def test_what_this_run_does_not_answer_traces_answer_then_the_experience_model(tmp_path: Path, scripted: Any) -> None:
    """`rash` cancels A2, which production only looks up: a trace knows the call. Of A9 none does: the model is asked."""
    message: dict[str, Any] = {"id": "c", "type": "function"}
    message["function"] = {"name": "cancel_order", "arguments": json.dumps({"order": "A2", "reason": "at once"})}
    trace = [
        {"role": "user", "content": "cancel it"},
        {"role": "assistant", "content": "", "tool_calls": [message]},
        {"role": "tool", "tool_call_id": "c", "content": "too late"},
        {"role": "assistant", "content": "It is too late."},
    ]
    (tmp_path / "traces.jsonl").write_text(json.dumps({"messages": trace, "reward": 1}) + "\n")
    desk, model = Desk(tmp_path), scripted(reply=lambda _: "valid, no progress yet\nreward 0, continues\nnot found")
    with ReplayBuffer(tmp_path / "replay.db") as replay_buffer:
        replay_buffer.extend(load_traces(tmp_path / "traces.jsonl"))
        experience = ExperienceModel(model, prompt_format="lines")
        graph = shadow(
            desk.graph, policy(rash), log=tmp_path / "log.db", replay_buffer=replay_buffer, experience_model=experience
        )
        for order in ("A2", "A9"):
            graph.invoke(ask(order), in_thread(order))
        assert wait_for_shadows(graph, 30)
    pairs, _ = CanaryLog(tmp_path / "log.db").pairs()
    assert [pair.details["answered_by"] for pair in pairs] == [{"recorded": 1}, {"model": 1}]
    assert [(pair.status, pair.same_writes) for pair in pairs] == [("compared", False), ("compared", False)]
    assert len(model.asked) == 1 and desk.cancelled == [("A9", "asked for")], "by production"


def test_the_policy_has_the_conversation_so_far_and_production_keeps_its_checkpoints(tmp_path: Path) -> None:
    """The policy answers by the first order: it has to know what was asked in an earlier run of the thread."""

    def by_first(messages: list[Any]) -> AIMessage:
        return AIMessage(messages[0].text)

    desk = Desk(tmp_path, reply=by_first, checkpointer=InMemorySaver())
    graph = shadow(desk.graph, policy(by_first), log=tmp_path / "log.db")
    for order in ("A1", "A2"):
        state = graph.invoke(ask(order), in_thread(1))
        assert wait_for_shadows(graph, 30)
    pairs, _ = CanaryLog(tmp_path / "log.db").pairs()
    assert [pair.same_answer for pair in pairs] == [True, True]
    assert len(state["messages"]) == 4 == len(desk.graph.get_state(in_thread(1)).values["messages"])


class Counted(TypedDict):
    number: Annotated[int, lambda before, given: before + given]
    user: str


def test_the_policy_has_state_configurable_and_context_of_the_run(tmp_path: Path) -> None:
    seen: list[tuple[str, int, str, str]] = []
    model = Model(label="production", reply=lambda _: AIMessage("ok"))

    def node(state: Counted, config: RunnableConfig, runtime: Any) -> dict[str, Any]:
        said = model.invoke([("human", "?")])
        seen.append((said.text, state["number"], config["configurable"]["tenant"], runtime.context["region"]))
        return {"user": said.text}

    from langgraph.runtime import Runtime

    node.__annotations__["runtime"] = Runtime[dict]
    builder = StateGraph(Counted, context_schema=dict).add_node("node", node).add_edge(START, "node")
    graph = shadow(
        builder.compile(checkpointer=InMemorySaver()),
        policy(lambda _: AIMessage("policy")),
        log=tmp_path / "log.db",
    )
    for number in (2, 3):
        graph.invoke({"number": number}, {"configurable": {"thread_id": "1", "tenant": "me"}}, context={"region": "eu"})
        assert wait_for_shadows(graph, 30)
    assert seen == [(who, number, "me", "eu") for number in (2, 5) for who in ("ok", "policy")]


@pytest.mark.parametrize("mode", [*MODES, MODES])
async def test_its_streams_are_productions(mode: Any, tmp_path: Path) -> None:
    desk = Desk(tmp_path, checkpointer=InMemorySaver())
    graph = shadow(desk.graph, policy(rash), log=tmp_path / "log.db")
    kinds = []
    for number, each in enumerate((desk.graph, graph)):
        chunks = list(each.stream(ask("A2"), in_thread(number), stream_mode=mode))
        chunks += [chunk async for chunk in each.astream(ask("A2"), in_thread(f"{number} async"), stream_mode=mode)]
        kinds.append([(type(chunk), sorted(chunk) if isinstance(chunk, dict) else len(chunk)) for chunk in chunks])
    assert kinds[0] == kinds[1] and (kinds[0] or mode == "custom")
    assert await asyncio.to_thread(wait_for_shadows, graph, 30)
    assert {pair.same_writes for pair in CanaryLog(tmp_path / "log.db").pairs()[0]} == {False}
    assert desk.cancelled == []


def test_a_run_that_stops_for_a_person_and_goes_on_is_counted_and_not_simulated(tmp_path: Path) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"approved: {interrupt('close it?')}")]}

    built = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile(checkpointer=InMemorySaver())
    graph = shadow(built, policy(), log=tmp_path / "log.db")
    assert graph.invoke(ask("A1"), in_thread(1))["__interrupt__"][0].value == "close it?"
    assert graph.invoke(Command(resume="yes"), in_thread(1))["messages"][-1].text == "approved: yes"
    assert wait_for_shadows(graph, 30)
    assert [pair.status for pair in CanaryLog(tmp_path / "log.db").pairs()[0]] == ["interrupted", "resumed"]


def test_a_broken_policy_is_no_concern_of_production_and_its_words_are_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    graph = shadow(desk.graph, policy(broken), log=tmp_path / "log.db")
    with caplog.at_level(logging.DEBUG, logger="dreamgym_lg"):
        assert graph.invoke(ask("A1"), in_thread(1))["messages"][-1].text == "Order A1: cancelled"
        assert wait_for_shadows(graph, 30)
    pair = only_pair(tmp_path / "log.db")
    assert pair.status == "failed" and pair.details["error"] == "ConnectionError"
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("log.db*"))
    assert b"sk-secret" not in stored and "sk-secret" not in caplog.text


def test_production_does_not_wait_for_a_slow_policy_and_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    going_on = threading.Event()

    def slow(messages: list[Any]) -> AIMessage:
        assert going_on.wait(30)
        return careful(messages)

    desk = Desk(tmp_path)
    graph = shadow(desk.graph, policy(slow), log=tmp_path / "log.db", most_waiting=2)
    for number in range(5):
        graph.invoke(ask("A2"), in_thread(number))
    assert not wait_for_shadows(graph, 0.01)
    going_on.set()
    assert wait_for_shadows(graph, 30)
    graph.invoke(ask("A2"), in_thread(5))
    assert wait_for_shadows(graph, 30)
    pairs, dropped = CanaryLog(tmp_path / "log.db").pairs()
    assert len(pairs) == 3 and dropped == 3


def test_a_loop_that_ends_ends_its_simulated_sides_and_the_next_one_is_as_good(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    graph = shadow(desk.graph, policy(careful), log=tmp_path / "log.db")
    asyncio.run(graph.ainvoke(ask("A2"), in_thread(1)))
    assert wait_for_shadows(graph, 30), "whether it was played or not"

    async def run() -> None:
        await graph.ainvoke(ask("A2"), in_thread(2))
        assert await asyncio.to_thread(wait_for_shadows, graph, 30)

    asyncio.run(run())
    pair = CanaryLog(tmp_path / "log.db").pairs()[0][-1]
    assert (pair.thread, pair.status, pair.same_answer) == ("2", "compared", True)


def test_a_node_that_touches_the_world_is_stopped_in_the_policys_run_alone(tmp_path: Path) -> None:
    file, model = tmp_path / "effects.txt", Model(label="production", reply=lambda _: AIMessage("said"))

    def node(state: MessagesState) -> dict[str, Any]:
        said = model.invoke(state["messages"])
        with open(file, "a") as effects:
            effects.write(said.text + "\n")
        return {"messages": [said]}

    graph = shadow(
        StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile(),
        policy(lambda _: AIMessage("policy")),
        log=tmp_path / "log.db",
    )
    graph.invoke(ask("A1"), in_thread(1))
    assert wait_for_shadows(graph, 30)
    assert only_pair(tmp_path / "log.db").status == "blocked" and file.read_text() == "said\n"


def test_both_sides_are_judged_by_the_users_own_check(tmp_path: Path) -> None:
    def refused(messages: list[Any]) -> AIMessage:
        return AIMessage("I cannot do that.")

    desk = Desk(tmp_path)
    graph = shadow(
        desk.graph, policy(refused), log=tmp_path / "log.db", verify=lambda _, state: "cancelled" in state["messages"][-1].text
    )
    graph.invoke(ask("A1"), in_thread(1))
    assert wait_for_shadows(graph, 30)
    pair = only_pair(tmp_path / "log.db")
    assert (pair.real_success, pair.simulated_success, pair.same_writes) == (True, False, False)


def test_identical_calls_are_answered_one_after_the_other_as_they_were(tmp_path: Path) -> None:
    """Looked up, cancelled, looked up again: the answer has changed, in the simulated side too."""

    def checks(messages: list[Any]) -> AIMessage:
        order, since = turn(messages)
        if len(since) in (0, 4):
            return call("get_order", order=order)
        return call("cancel_order", order=order, reason="x") if len(since) == 2 else AIMessage(since[-1].text)

    desk = Desk(tmp_path, reply=checks)
    graph = shadow(desk.graph, policy(checks), log=tmp_path / "log.db")
    assert graph.invoke(ask("A1"), in_thread(1))["messages"][-1].text == "cancelled"
    assert wait_for_shadows(graph, 30)
    pair = only_pair(tmp_path / "log.db")
    assert pair.same_answer and pair.details["answered_by"] == {"this run": 3}


def test_a_graph_that_hands_work_to_threads_of_productions_is_not_simulated(tmp_path: Path) -> None:
    """The world's end of an unanswered call is no `Exception`: it would end a worker that catches those."""
    pool, model = ThreadPoolExecutor(1), Model(label="production", reply=lambda _: AIMessage("ok"))

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [pool.submit(model.invoke, state["messages"]).result()]}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
    with pytest.raises(ConfigurationError, match="the nodes node hand work to threads of their own"):
        shadow(graph, policy(), log=tmp_path / "log.db")
    pool.shutdown()


def test_wrong_arguments_are_said(tmp_path: Path) -> None:
    desk, log = Desk(tmp_path), tmp_path / "log.db"
    with pytest.raises(ConfigurationError, match="share=0"):
        shadow(desk.graph, policy(), log=log, share=0)
    with pytest.raises(ConfigurationError, match="unknown tool in writes 'cancel'"):
        shadow(desk.graph, policy(), log=log, writes=["cancel"])
    with pytest.raises(ConfigurationError, match="is no compiled graph"):
        shadow("graph", policy(), log=log)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="is no chat model"):
        shadow(desk.graph, "gpt", log=log)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no graph that shadow"):
        wait_for_shadows(desk.graph)
    assert not log.exists() or not CanaryLog(log).names()
