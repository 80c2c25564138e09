"""A share of the threads for the policy: who is served by whom, and what takes them back."""

import asyncio
import multiprocessing
import os
import sqlite3
from collections import Counter
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
from desk import Desk, Model, ask, broken, careful, in_thread, policy, rash
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command

from dreamgym_lg.errors import CanaryLogError, ConfigurationError
from dreamgym_lg.production import CanaryLog, canary


def says(text: str) -> Any:
    return lambda _: AIMessage(text)


def talker(reply: Any = None, **options: Any) -> Any:
    """A graph that only talks."""
    model = Model(label="production", reply=reply or says("production"))

    def node(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    return StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile(**options)


def who(graph: Any, thread: object) -> str:
    return graph.invoke(ask("A1"), in_thread(thread))["messages"][-1].text


def test_a_share_of_the_threads_stays_with_the_policy_in_every_process(tmp_path: Path) -> None:
    options: dict[str, Any] = {"log": tmp_path / "log.db", "name": "v2", "share": 0.3}
    graph = canary(talker(), policy(says("policy")), **options)
    first = {number: who(graph, number) for number in range(150)}
    assert 25 <= Counter(first.values())["policy"] <= 65
    again = canary(talker(), policy(says("policy")), **options)
    assert {number: who(again, number) for number in first} == first, "a thread stays where it is after a restart"
    served = CanaryLog(options["log"]).state().served
    assert served["policy"].threads + served["production"].threads == 150
    assert served["policy"].runs + served["production"].runs == 300


def test_a_larger_share_takes_new_threads_only(tmp_path: Path) -> None:
    log = tmp_path / "log.db"
    few = {number: who(canary(talker(), policy(says("policy")), log=log, share=0.1), number) for number in range(20)}
    graph = canary(talker(), policy(says("policy")), log=log, share=1.0)
    assert {number: who(graph, number) for number in few} == few
    assert {who(graph, f"new {number}") for number in range(5)} == {"policy"}


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_only_the_chosen_side_acts_on_the_real_tools(asynchronous: bool, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    graph = canary(desk.graph, policy(rash), log=tmp_path / "log.db", share=0.5)
    for number in range(12):
        given = ask("A3"), in_thread(number)
        await graph.ainvoke(*given) if asynchronous else graph.invoke(*given)
    served = CanaryLog(tmp_path / "log.db").state().served
    reasons = Counter(reason for _, reason in desk.cancelled)
    assert reasons == {"at once": served["policy"].threads, "asked for": served["production"].threads}
    assert min(reasons.values()) > 1


def test_a_run_without_a_thread_is_one_of_its_own(tmp_path: Path) -> None:
    graph = canary(talker(), policy(says("policy")), log=tmp_path / "log.db", share=0.5)
    found = Counter(graph.invoke(ask("A1"))["messages"][-1].text for _ in range(30))
    served = CanaryLog(tmp_path / "log.db").state().served
    assert found == {"policy": served["policy"].threads, "production": served["production"].threads} and len(found) == 2


def test_interrupts_and_checkpoints_are_the_chosen_sides(tmp_path: Path) -> None:
    """A person approves a call of the policy; then the canary is ended, and production goes on from the same checkpoint."""
    middleware = [HumanInTheLoopMiddleware(interrupt_on={"cancel_order": True})]
    desk = Desk(tmp_path, checkpointer=InMemorySaver(), middleware=middleware)
    graph = canary(desk.graph, policy(rash), log=tmp_path / "log.db", share=1.0)
    asked = graph.invoke(ask("A1"), in_thread(1))["__interrupt__"][0].value
    assert asked["action_requests"][0]["args"] == {"order": "A1", "reason": "at once"} and desk.cancelled == []
    ended = graph.invoke(Command(resume={"decisions": [{"type": "approve"}]}), in_thread(1))
    assert ended["messages"][-1].text == "Done." and desk.cancelled == [("A1", "at once")]
    CanaryLog(tmp_path / "log.db").stop()
    state = graph.invoke(ask("A2"), in_thread(1))
    assert state["messages"][-1].text == "Order A2: shipped" and state["messages"][0].text.endswith("A1")
    assert graph.get_state(in_thread(1)).values["messages"] == state["messages"]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_every_stream_mode_is_the_policys_own(asynchronous: bool, tmp_path: Path) -> None:
    modes: list[Any] = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints"]
    graph = canary(talker(), policy(says("policy")), log=tmp_path / "log.db", share=1.0)
    if asynchronous:
        chunks = [chunk async for chunk in graph.astream(ask("A1"), in_thread(1), stream_mode=modes)]
        events = [event["event"] async for event in graph.astream_events(ask("A1"), in_thread(1), version="v2")]
        assert events[0] == "on_chain_start" and events[-1] == "on_chain_end"
    else:
        chunks = list(graph.stream(ask("A1"), in_thread(1), stream_mode=modes))
    assert {mode for mode, _ in chunks} >= {"values", "updates", "messages", "tasks"}
    assert "policy" in str(chunks) and "'production'" not in str(chunks)


async def test_who_reads_a_part_of_the_stream_leaves_the_rest_unplayed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    graph = canary(desk.graph, policy(rash), log=tmp_path / "log.db", share=1.0)
    async with aclosing(graph.astream(ask("A1"), in_thread(1), stream_mode="updates")) as chunks:
        await anext(chunks)
    with closing(graph.stream(ask("A1"), in_thread(2), stream_mode="updates")) as read:
        next(read)
    assert desk.cancelled == [] and CanaryLog(tmp_path / "log.db").state().served["policy"].errors == 0


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_run_at_a_breakpoint_has_no_outcome_yet(asynchronous: bool, tmp_path: Path) -> None:
    seen = list[str]()
    talks = talker(checkpointer=InMemorySaver(), interrupt_before=["node"])
    verify = lambda _, state: not seen.append(state["messages"][-1].text)  # noqa: E731
    graph = canary(talks, policy(says("policy")), log=tmp_path / "log.db", share=1.0, verify=verify)
    for payload in (ask("A1"), None):
        await graph.ainvoke(payload, in_thread(1)) if asynchronous else graph.invoke(payload, in_thread(1))
    assert seen == ["policy"]
    paused = next(each for each in graph.get_state_history(in_thread(1)) if each.next == ("node",))
    await graph.ainvoke(None, paused.config) if asynchronous else graph.invoke(None, paused.config)
    assert seen == ["policy", "policy"], "played again from the breakpoint to its end"


# --- what turns it off --------------------------------------------------------------------------------------------------------


def test_a_worse_policy_ends_the_canary_by_itself_and_for_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every thread of the policy fails, most of production's succeed. The outcomes come from the user's own check."""
    options: dict[str, Any] = {"log": tmp_path / "log.db", "name": "v2", "share": 0.2}
    graph, log = canary(talker(), policy(says("policy")), **options), CanaryLog(tmp_path / "log.db")
    for number in range(400):
        side = who(graph, number)
        log.record_outcome(str(number), side == "production" and number % 10 != 0)
        if log.state().ended is not None:
            break
    state = log.state()
    assert number < 120 and state.ended and state.evidence.worse >= 20 and state.evidence.better == 1
    assert state.verdict.startswith("ended: the policy is proven worse than production (alpha 0.05): policy 0 of ")
    assert "canary v2 has ended" in caplog.text
    again = canary(talker(), policy(says("policy")), **options)
    assert {who(again, thread) for thread in range(500)} == {"production"}


def test_errors_of_the_policy_end_it_too_and_reach_the_caller(tmp_path: Path) -> None:
    graph = canary(talker(), policy(broken), log=tmp_path / "log.db", share=0.5, verify=lambda _, state: True)
    raised = 0
    for number in range(100):
        try:
            assert who(graph, number) == "production"
        except ConnectionError:
            raised += 1
    state = CanaryLog(tmp_path / "log.db").state()
    assert state.ended and raised == state.served["policy"].errors < 25
    assert state.served["production"].errors == 0


def test_a_better_policy_is_said_to_be_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    graph = canary(
        talker(), policy(says("policy")), log=tmp_path / "log.db", share=0.5, verify=lambda _, state: "policy" in str(state)
    )
    for number in range(40):
        who(graph, number)
    state = CanaryLog(tmp_path / "log.db").state()
    assert state.better and not state.ended and state.verdict.startswith("better: ")
    assert caplog.text.count("proven better") == 1


def test_an_outcome_that_is_not_known_yet_or_raises_is_none(tmp_path: Path) -> None:
    def verify(given: Any, state: Any) -> bool | None:
        if len(state["messages"]) == 2:
            return None
        if len(state["messages"]) == 4:
            raise KeyError("order")
        return False

    graph = canary(
        talker(checkpointer=InMemorySaver()), policy(says("policy")), log=tmp_path / "log.db", share=1.0, verify=verify
    )
    for expected in (None, None, 0):
        who(graph, 1)
        found = CanaryLog(tmp_path / "log.db").state().served["policy"].success
        assert (found and found.successes) == expected


def test_a_log_that_cannot_be_written_leaves_production_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dreamgym_lg.production.log._BUSY_SECONDS", 0.01)
    graph = canary(talker(), policy(says("policy")), log=tmp_path / "log.db", share=1.0)
    with closing(sqlite3.connect(tmp_path / "log.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert who(graph, 1) == "production"
    assert "production serves this run: " in caplog.text and "locked" in caplog.text
    assert who(graph, 1) == "policy"


# --- processes, and what is refused -------------------------------------------------------------------------------------------


def serve(log: Path, first: int) -> None:
    graph, told = canary(talker(), policy(says("policy")), log=log, name="v2", share=0.5), CanaryLog(log)
    for number in range(first, first + 40):
        side = who(graph, number % 60)
        told.record_outcome(str(number % 60), side == "policy")
    os._exit(0)


def test_processes_share_one_canary(tmp_path: Path) -> None:
    """Four of them serve threads in part the same, and record outcomes; every thread has one side and one outcome."""
    log, fork = tmp_path / "log.db", multiprocessing.get_context("fork")
    CanaryLog(log)
    workers = [fork.Process(target=serve, args=(log, first)) for first in (0, 20, 40, 60)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    state = CanaryLog(log).state()
    assert sum(side.threads for side in state.served.values()) == 60 and sum(side.runs for side in state.served.values()) == 160
    assert state.better is not None
    rates = [side.success for side in state.served.values()]
    assert all(rate and rate.value == expected for rate, expected in zip(rates, (1, 0), strict=True))


def test_the_original_graph_is_as_it_was_and_a_dream_of_the_canary_is_a_dream(tmp_path: Path) -> None:
    from dreamgym_lg import with_policy

    plain = talker()
    before = dict(vars(plain))
    graph = canary(plain, policy(says("policy")), log=tmp_path / "log.db", share=1.0)
    assert type(graph).__name__ == "CompiledStateGraph" and isinstance(graph, type(plain))
    assert plain.invoke(ask("A1"))["messages"][-1].text == "production" and dict(vars(plain)) == before
    assert with_policy(graph, policy(says("dream"))).invoke(ask("A1"))["messages"][-1].text == "dream"
    assert CanaryLog(tmp_path / "log.db").state().served["policy"].threads == 0
    assert graph.with_config(tags=["x"]).invoke(ask("A1"), in_thread(1))["messages"][-1].text == "policy"


def test_a_canary_within_another_graph_serves_the_threads_of_that_one(tmp_path: Path) -> None:
    inner = canary(talker(), policy(says("policy")), log=tmp_path / "log.db", share=1.0)
    outer = StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner").compile(checkpointer=InMemorySaver())
    heard: list[str] = []

    class Listener(BaseCallbackHandler):
        def on_chat_model_start(self, serialized: Any, messages: Any, **_: Any) -> None:
            heard.append(messages[0][-1].text)

    state = outer.invoke(input=ask("A1"), config={**in_thread("7"), "callbacks": [Listener()]})
    assert state["messages"][-1].text == "policy" and heard == ["Please cancel order A1"]
    assert CanaryLog(tmp_path / "log.db").record_outcome("7", True)
    assert next(inner.stream(input=ask("A1"), config=in_thread("8"), stream_mode="values"))["messages"]


def test_wrong_arguments_and_another_policys_name_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"log": tmp_path / "log.db", "name": "v2"}
    graph = talker()
    canary(graph, policy(), **options)
    for wrong, match in (
        ({"alpha": 0.01}, "was begun as a canary of policy 'Model' with alpha=0.05, and"),
        ({"alpha": 0}, "alpha=0: give the probability"),
        ({"share": 1.5}, "share=1.5"),
        ({"share": 0}, "share=0"),
        ({"route": ["nod"]}, "unknown node in route=: 'nod'"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            canary(graph, policy(), **{**options, **wrong})  # type: ignore[arg-type]

    class Other(Model):
        pass

    with pytest.raises(ConfigurationError, match="given as a canary of policy 'Other'"):
        canary(graph, Other(label="other", reply=careful), **options)
    log = CanaryLog(tmp_path / "log.db")
    with pytest.raises(ConfigurationError, match="thread '7' was not served by canary 'v2'"):
        log.record_outcome("7", True)
    with pytest.raises(ConfigurationError, match="unknown canary 'v3'"):
        log.state("v3")
    log.stop()
    assert log.state().verdict == "ended: stopped by hand"
    (tmp_path / "notes.txt").write_text("no database, but more than a hundred bytes of text " * 20)
    with pytest.raises(CanaryLogError, match="notes.txt"):
        CanaryLog(tmp_path / "notes.txt")
    with closing(sqlite3.connect(tmp_path / "foreign.db")) as foreign, foreign:
        foreign.execute("CREATE TABLE theirs (x)")
    before = (tmp_path / "foreign.db").read_bytes()
    with pytest.raises(CanaryLogError, match="no canary log of this release"):
        CanaryLog(tmp_path / "foreign.db")
    assert (tmp_path / "foreign.db").read_bytes() == before


async def test_many_runs_at_once_do_not_mix(tmp_path: Path) -> None:
    graph = canary(talker(), policy(says("policy")), log=tmp_path / "log.db", share=0.5)
    states = await asyncio.gather(*(graph.ainvoke(ask("A1"), in_thread(number)) for number in range(24)))
    found = Counter(state["messages"][-1].text for state in states)
    served = CanaryLog(tmp_path / "log.db").state().served
    assert found == {"policy": served["policy"].threads, "production": served["production"].threads}
