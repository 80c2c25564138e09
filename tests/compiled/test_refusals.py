"""A tool that ends in an error refuses the call. A world learns the errors that its rules explain, and no others."""

import asyncio
import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from compiled_shop import walled
from langchain_core.messages import AIMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.tools import BaseTool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from dreamgym_lg import Dream, ReplayBuffer, Step, Task, Trajectory
from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.compiled.chat_writer import ChatWriter
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.compiled.drawing import draw_tasks
from dreamgym_lg.compiled.enumerate_rules import find_unlearnable
from dreamgym_lg.compiled.examples import CallRecord
from dreamgym_lg.compiled.recordings import Recordings, Trace
from dreamgym_lg.compiled.replaying import Replay, ToolReplay, replay_page
from dreamgym_lg.compiled.responder import Compiled, EndState
from dreamgym_lg.compiled.runtime import Refusal, State, follow, load_module
from dreamgym_lg.dream import Episode, References, TraceIndex
from dreamgym_lg.hosted import Hosted, name_of

EPISODES = 40
LIMIT = "Tool call limit reached: run limit exceeded (3/3 calls)."


def _tools(orders: Mapping[str, dict[str, Any]]) -> list[BaseTool]:
    @tool
    def get_order(order_id: str) -> dict[str, Any]:
        """Look an order up."""
        return orders[order_id]

    @tool
    def refund(order_id: str) -> str:
        """Pay an order back."""
        order = orders[order_id]
        if order["status"] != "open":
            raise ValueError(f"order {order_id} is {order['status']}")
        order["status"] = "refunded"
        return f"{order_id} refunded: {order['total']}"

    return [get_order, refund]


def _order(number: int) -> dict[str, Any]:
    rng = Random(number)
    return {"id": f"K{number}", "status": rng.choice(["open", "delivered"]), "total": rng.randint(5, 99)}


def _run(orders: Mapping[str, dict[str, Any]], calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, bool]]:
    """(text, no error) of each call, as LangGraph's own node answers them."""
    node = ToolNode(_tools(orders), handle_tool_errors=True)
    graph = StateGraph(MessagesState).add_node("tools", node).add_edge(START, "tools").compile()
    answers = []
    for name, own in calls:
        call = {"name": name, "args": dict(own), "id": "1", "type": "tool_call"}
        message = graph.invoke({"messages": [AIMessage("", tool_calls=[call])]})["messages"][-1]
        answers.append((message.text, message.status != "error"))
    return answers


def _episode(number: int, *, disturbed: bool) -> Trajectory:
    """An order is looked up, paid back, looked up again, and paid back again. Some calls never reach the tool."""
    rng, order = Random(number), _order(number)
    own = {"order_id": order["id"]}
    calls: list[tuple[str, dict[str, Any]]] = [("get_order", own), ("refund", own), ("refund", {"order": order["id"]})]
    calls += [("get_order", own), *[("refund", own)] * (number % 2)]
    steps = []
    for (name, arguments), (text, valid) in zip(calls, _run({order["id"]: order}, calls), strict=True):
        action = render_call(name, arguments)
        if disturbed and name == "refund" and own == arguments and rng.random() < 0.2:
            call_id = f"call_{rng.randint(100, 999)}"
            error = rng.choice([f"User rejected the tool call for `refund` with id {call_id}", LIMIT])
            steps.append(Step(observation="", action=action, next_observation=error, valid=False))
        steps.append(Step(observation="", action=action, next_observation=text, valid=valid))
    if disturbed and number == 1001:  # one that no other is like
        steps.insert(1, Step(observation="", action=render_call("refund", own), next_observation="Not today!", valid=False))
    steps.append(Step(observation="", action=render_answer("Done."), next_observation="", reward=1.0, terminated=True))
    instruction = f"Pay {order['id']} back."
    task = Task(id=f"desk/{number}", instruction=instruction, environment="desk", tools=["get_order", "refund"])
    return Trajectory(task=task, steps=steps, success=True)


def _recorded(*, disturbed: bool) -> ReplayBuffer:
    replay_buffer = ReplayBuffer(":memory:")
    replay_buffer.extend(_episode(1000 + number, disturbed=disturbed) for number in range(EPISODES))
    return replay_buffer


@pytest.fixture(scope="module")
def buffer() -> ReplayBuffer:
    return _recorded(disturbed=False)


@pytest.fixture(scope="module")
def compiled(buffer: ReplayBuffer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ToolReplay]:
    folder = tmp_path_factory.mktemp("desk")
    report = compile_world(buffer, folder, tools=_tools({}), writes=["refund"], on_progress=lambda *_: None)
    return folder, report[-1]


@pytest.fixture
def world(compiled: tuple[Path, ToolReplay]) -> Iterator[Compiled]:
    with contextlib.closing(Compiled(compiled[0])) as opened:
        yield opened


def test_errors_of_a_writing_tool_are_cases_of_its_rule(buffer: ReplayBuffer, compiled: tuple[Path, ToolReplay]) -> None:
    folder, refund = compiled
    steps = [step for each in buffer.trajectories() for step in each.steps if '"order_id"' in step.action]
    errors = sum(not step.valid for step in steps)
    assert (refund.exact, refund.refused, refund.wrong) == (EPISODES + EPISODES // 2, 0, 0) and refund.admitted
    assert (refund.errors, refund.left_out) == (errors, 0), "wrong arguments are refused before the tool runs"
    assert "return Refusal(" in (folder / "world.py").read_text()
    assert f"* `refund`: {errors} are learned, 0 left out\n" in (folder / "REPLAY.md").read_text()


def test_errors_that_are_not_the_backends_are_left_out_and_change_no_figure(
    compiled: tuple[Path, ToolReplay], tmp_path: Path
) -> None:
    report = compile_world(
        recorded := _recorded(disturbed=True),
        tmp_path / "world",
        tools=_tools({}),
        writes=["refund"],
        on_progress=lambda *_: None,
    )
    (refund,), (folder, undisturbed) = report[1:], compiled
    for name in ("exact", "refused", "unknowable", "wrong", "admitted", "errors"):
        assert getattr(refund, name) == getattr(undisturbed, name), name
    texts = [step.next_observation for each in recorded.trajectories() for step in each.steps if not step.valid]
    assert refund.left_out == sum(text.startswith(("User rejected", "Tool call limit", "Not today")) for text in texts) > 10
    assert 0 < refund.answered < refund.left_out, "the world answers as the tool would have"
    assert refund.left_out_text in texts and f"{refund.left_out} left out, the first with" in replay_page(report, 0.7)
    written = [(path / "world.py").read_text().partition("def refund")[2] for path in (folder, tmp_path / "world")]
    assert written[0] == written[1]


@walled
def test_a_dreamed_refusal_is_an_error_and_changes_nothing(world: Compiled, buffer: ReplayBuffer) -> None:
    number = next(n for n in range(1000, 1000 + EPISODES) if _order(n)["status"] == "delivered")
    task, own = _episode(number, disturbed=False).task, {"order_id": f"K{number}"}
    environment = Dream([world]).create_environment()
    environment.reset(task)
    ((text, valid),) = _run({f"K{number}": _order(number)}, [("refund", own)])
    step = environment.step(render_call("refund", own))
    assert (step.observation, step.info["valid"], step.info["decided_by"]) == (text, valid, "compiled") and not valid
    again = environment.step(render_call("get_order", own))
    assert '"delivered"' in again.observation and again.info["valid"]


@walled
def test_the_end_state_is_the_same_after_a_refused_call(world: Compiled, buffer: ReplayBuffer) -> None:
    number = next(n for n in range(1000, 1000 + EPISODES) if _order(n)["status"] == "open")
    task, refund = _episode(number, disturbed=False).task, render_call("refund", {"order_id": f"K{number}"})
    judge = EndState(world, References(TraceIndex(buffer, writes=["refund"])))
    paid = Step(observation="", action=refund, next_observation=f"K{number} refunded: {_order(number)['total']}")
    again = world.respond(Episode(task=task, steps=[paid], action=refund))
    assert again is not None and not again.valid and "is refunded" in again.observation
    refused = Step(observation="", action=refund, next_observation=again.observation, valid=False)
    rejected = Step(observation="", action=refund, next_observation="User rejected it", valid=False)

    def success(*steps: Step) -> bool:
        verdict = judge.judge(Episode(task=task, steps=steps, action=render_answer("Done.")), None)
        assert verdict is not None
        return verdict.success

    assert success(paid) and success(paid, refused) and success(rejected, paid)
    assert not success() and not success(rejected)
    twice = [["refund", {"order_id": f"K{number}"}, None]] * 2
    assert None not in world.changes(task.id, twice[:1]).values() and None in world.changes(task.id, twice).values()


def test_a_refusal_that_the_module_gives_changes_what_the_module_says() -> None:
    """A person may write a module that counts failed attempts."""
    text = """from runtime import Refusal
READS, JSON, MAY_CHANGE, NEVER_CHANGES = {'tries': ()}, {}, {}, {}
def login(state, /, **args):
    state.write('tries', state.read('tries') + 1)
    return Refusal('no such user')
"""
    source, state = load_module(text, Path("world.py")), State({("tries", "{}"): "0"})
    for error in (["no such user"], ["a person rejected it"], Refusal("no such user")):
        assert follow(source, state, "login", {}, error) == Refusal("no such user")
    assert state.read("tries") == 2


def test_an_error_is_no_answer_of_the_same_text() -> None:
    text = "READS, JSON, MAY_CHANGE, NEVER_CHANGES = {}, {}, {}, {}\ndef refund(state, /): return 'it is delivered'\n"
    replay = Replay(Recordings([], frozenset({"refund"}), {}))
    source = load_module(text, Path("world.py"))
    for recorded in ("it is delivered", Refusal("it is delivered")):
        trace = Trace("", [("refund", {}, recorded)])
        replay.add(trace, [follow(source, State(), *call) for call in trace.calls])
    (refund,) = replay.report(0.7)
    assert (refund.exact, refund.wrong, refund.left_out, refund.answered) == (1, 0, 1, 1)


def test_only_what_a_rule_explains_is_learnable() -> None:
    def trace(number: int) -> list[CallRecord]:
        order, own = _order(number), {"id": f"K{number}"}
        kinds = {1: Refusal(f"Rejected by clerk {number}."), 2: Refusal(f"K{number}: try again later")}
        answer: Any = "paid" if order["status"] == "open" else Refusal(f"K{number} is {order['status']}")
        return [CallRecord("get", own, order), CallRecord("pay", own, kinds.get(number % 12, answer))]

    assert find_unlearnable([trace(number) for number in range(1000, 1050)], ["pay"]) == {
        ("pay", "rejected by clerk 0"),
        ("pay", "0 try again later"),
    }


def test_a_tool_that_only_failed_may_have_been_made_up() -> None:
    trajectory = _episode(next(n for n in range(1000, 1040) if _order(n)["status"] == "open"), disturbed=False)
    made_up = Step(observation="", action=render_call("pay-back!", {}), next_observation="no such tool", valid=False)
    replay_buffer = ReplayBuffer(":memory:")
    replay_buffer.add(Trajectory(task=trajectory.task, steps=[made_up, *trajectory.steps], success=True))
    recordings = Recordings.of(replay_buffer, tools=_tools({}), writes=["refund"], environment=None)
    assert {tool for tool, _, _ in recordings.calls} == {"get_order", "refund"}


@walled
def test_a_reference_holds_no_refused_call(world: Compiled, buffer: ReplayBuffer) -> None:
    drawing = draw_tasks(world, TraceIndex(buffer, writes=["refund"]), 20, seed=1)
    answers = [answer for task in drawing.tasks for _, answer in task.drawn["steps"]]
    assert drawing.tasks and not any("ValueError" in answer for answer in answers)


@walled
async def test_a_refusal_is_served_as_a_tool_error(world: Compiled) -> None:
    memory = pytest.importorskip("mcp.shared.memory")
    from dreamgym_lg.compiled.mcp_server import create_server

    number = next(n for n in range(1000, 1000 + EPISODES) if _order(n)["status"] == "open")
    async with memory.create_connected_server_and_client_session(create_server(world)) as client:
        results = [await client.call_tool("refund", {"order_id": f"K{number}"}) for _ in range(2)]
    assert [result.isError for result in results] == [False, True]
    assert "is refunded" in results[1].content[0].text and "does not know" not in results[1].content[0].text


@walled
async def test_parallel_calls_of_a_session_change_the_state_one_after_the_other(world: Compiled) -> None:
    memory = pytest.importorskip("mcp.shared.memory")
    from dreamgym_lg.compiled.mcp_server import create_server

    number = next(n for n in range(1000, 1000 + EPISODES) if _order(n)["status"] == "open")
    async with memory.create_connected_server_and_client_session(create_server(world)) as client:
        calls = (client.call_tool("refund", {"order_id": f"K{number}"}) for _ in range(3))
        results = await asyncio.gather(*calls)
    assert sorted(result.isError for result in results) == [False, True, True], "refunded once"


@walled
def test_a_world_refuses_with_a_text(compiled: tuple[Path, ToolReplay], tmp_path: Path) -> None:
    shutil.copytree(compiled[0], folder := tmp_path / "world")
    with (folder / "world.py").open("a") as module:
        module.write("\n\ndef refund(state, /, **args):\n    return Refusal(3)\n")
    with contextlib.closing(Compiled(folder)) as world, pytest.raises(Exception, match="with list instead of a text"):
        world.answer("", [], "refund", {"order_id": "K1000"})


@walled
def test_a_chat_model_is_asked_only_for_what_the_enumerated_rules_do_not_replay(
    buffer: ReplayBuffer, scripted: Any, tmp_path: Path
) -> None:
    said, chat = list[str](), scripted(reply=lambda _: "no code")

    def compile_desk(recorded: ReplayBuffer) -> ToolReplay:
        options: dict[str, Any] = {"tools": _tools({}), "writes": ["refund"], "rounds": 1, "on_progress": lambda *_: None}
        return compile_world(recorded, tmp_path / "world", writer=chat, say=said.append, **options)[-1]

    refund = compile_desk(buffer)
    assert not chat.asked and "none is asked" in said[0] and refund.errors and not refund.lacking and not refund.wrong
    disturbed = _recorded(disturbed=True)
    assert compile_desk(disturbed).exact == refund.exact, "what is enumerated stays"
    assert not chat.asked, "nor for a person's rejections"
    recordings = Recordings.of(disturbed, tools=_tools({}), writes=["refund"], environment=None)
    writer, module = ChatWriter(chat, Hosted()), (tmp_path / "world" / "world.py").read_text()
    writer.write(recordings, module, ["refund differs"])
    (prompt,) = chat.asked
    estimate = writer.estimate(recordings, 1, module, ["refund differs"])
    assert f"at most 1 calls of {name_of(chat)}, about {count_tokens_approximately(prompt):,} tokens read" in estimate
    assert (
        "-> Refusal(text=" in prompt[-1].text and "`Refusal(text)`" in prompt[0].text and "return Refusal(" in prompt[-1].text
    )
