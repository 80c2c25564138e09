"""A world compiled from traces: exact where it answers, silent where it does not know, harmless where it is hostile."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from compiled_shop import Shop, walled
from langchain_core.tools import StructuredTool
from typer.testing import CliRunner

from dreamgym_lg import ReplayBuffer, Step, Task, Trajectory
from dreamgym_lg.actions import parse_call, render_answer, render_call
from dreamgym_lg.cli.app import app
from dreamgym_lg.compiled import enumerate_rules, runtime
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.compiled.enumerate_rules import find_rules
from dreamgym_lg.compiled.examples import Binding, CallRecord
from dreamgym_lg.compiled.expressions import MENTIONED, Build, Const, Fixed, Later, Ref, Scope, Text, evaluate
from dreamgym_lg.compiled.generalizing import generalize
from dreamgym_lg.compiled.limits import same_ids
from dreamgym_lg.compiled.recordings import STYLES, Recordings, Trace, _schema
from dreamgym_lg.compiled.replaying import ToolReplay, replay_page
from dreamgym_lg.compiled.responder import Compiled, EndState, compiled_dream
from dreamgym_lg.compiled.runtime import Module, State, Unknown, answer_of, fixed, follow, key_of, later, parsed, put, rounded
from dreamgym_lg.compiled.source import write_rules
from dreamgym_lg.compiled.trees import MIXED, decide, learn
from dreamgym_lg.dream import Dream, Episode, Model, Recorded, References, TraceIndex
from dreamgym_lg.errors import ConfigurationError, ProcessLost

WRITES = ("refund", "move", "note")


def _calls(rng: Random, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    order, customer = f"K{number}", f"C{number}"
    if rng.random() < 0.85:
        yield "get_order", {"order_id": order}
    if rng.random() < 0.7:
        yield "get_customer", {"customer_id": customer}
    for _ in range(rng.randint(1, 3)):
        yield rng.choice(
            [
                ("refund", {"order_id": order}),
                ("move", {"customer_id": customer, "city": rng.choice(["Rome", "Kiel"])}),
                ("note", {"text": "done"}),
            ]
        )
    if rng.random() < 0.6:
        yield rng.choice([("get_order", {"order_id": order}), ("get_customer", {"customer_id": customer})])


def _trajectory(number: int) -> Trajectory:
    rng = Random(number)
    shop, steps, observation = Shop(rng, number), [], f"Help with order K{number}"
    for tool, arguments in _calls(rng, number):
        answer = shop.call(tool, arguments)
        steps.append(Step(observation=observation, action=render_call(tool, arguments), next_observation=answer))
        observation = answer
    steps.append(Step(observation=observation, action=render_answer("Done."), next_observation="", reward=1.0, terminated=True))
    task = Task(
        id=f"shop/{number}",
        instruction=f"Help with order K{number}",
        environment="shop",
        tools=["refund", "move", "note", "get_order", "get_customer"],
    )
    return Trajectory(task=task, steps=steps, success=True)


TRAJECTORIES = [_trajectory(1000 + number) for number in range(160)]


@pytest.fixture(scope="module")
def buffer() -> ReplayBuffer:
    replay_buffer = ReplayBuffer(":memory:")
    replay_buffer.extend(TRAJECTORIES)
    return replay_buffer


@pytest.fixture(scope="module")
def compiled(buffer: ReplayBuffer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, ToolReplay]]:
    folder = tmp_path_factory.mktemp("world")
    report = compile_world(buffer, folder, writes=WRITES, on_progress=lambda *_: None)
    return folder, {each.tool: each for each in report}


def test_rules_of_writing_tools_answer_left_out_traces_exactly_and_none_wrongly(compiled: Any) -> None:
    _, report = compiled
    assert {tool: each.wrong for tool, each in report.items()} == dict.fromkeys(report, 0)
    assert {tool for tool, each in report.items() if each.admitted} == {*WRITES, "get_order", "get_customer"}
    for tool in WRITES:
        assert report[tool].exact > 2 * report[tool].refused, tool
    assert report["get_order"].exact > 10 and report["get_customer"].exact > 10  # read again, behind writing calls


@pytest.mark.parametrize(
    ("exact", "wrong", "refused", "why"),
    [
        (90, 9, 1, "9 of 99 answers"),
        (0, 0, 7, "no rule answers any of its 7 calls"),
        (4, 0, 2, "it answered 4 calls of left-out traces exactly, too few"),
        (90, 0, 5, ""),
    ],
)
def test_why_a_writing_tool_is_not_admitted(exact: int, wrong: int, refused: int, why: str) -> None:
    tool = ToolReplay("refund", True, exact, refused, 0, wrong)
    tool.admit(0.7)
    assert tool.refusal.startswith(why) and bool(why) is not tool.admitted


def test_the_page_states_the_rule_of_admission_and_which_tools_were_not_measured() -> None:
    tools = [ToolReplay("find", False, refused=4), ToolReplay("get", False, 3), ToolReplay("refund", True, 90, wrong=5)]
    for tool in tools:
        tool.admit(0.6)
    page = replay_page(tools, 0.6)
    assert "at least 99% of its answers are exact" in page and "also begin at\n0.6 or above" in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row[-1] for row in rows] == ["yes, not measured |", "yes |", "no |"]


@walled
def test_another_module_has_another_digest(compiled: Any, tmp_path: Path) -> None:
    """The gate measures it anew."""
    shutil.copytree(compiled[0], copy := tmp_path / "copy")
    assert Compiled(copy).digest == Compiled(compiled[0]).digest
    (copy / "world.py").write_text((copy / "world.py").read_text() + "\n")
    changed, index = Compiled(copy), TraceIndex(ReplayBuffer(":memory:"))
    assert changed.digest != Compiled(compiled[0]).digest
    assert compiled_dream(copy, index).versions != compiled_dream(compiled[0], index).versions
    assert compiled_dream(copy, index).version == "dream", "no model decides"


def test_the_folder_can_be_read(compiled: Any) -> None:
    folder, report = compiled
    text = (folder / "world.py").read_text()
    assert "'sent'" in text and "100" in text and "'refunded'" in text
    table = (folder / "REPLAY.md").read_text()
    refund = report["refund"]
    assert f"| `refund` | writes | {refund.exact} | {refund.refused} | {refund.unknowable} | 0 |" in table
    assert 0 < refund.unknowable <= refund.refused
    assert json.loads((folder / "rules.json").read_text())["admitted"]["refund"] is True


@walled
def test_every_recorded_episode_is_answered_as_it_was_recorded_or_not_at_all(compiled: Any) -> None:
    world = Compiled(compiled[0])
    answered = 0
    for trajectory in TRAJECTORIES[:40]:
        for number, step in enumerate(trajectory.steps):
            answer = world.respond(Episode(task=trajectory.task, steps=trajectory.steps[:number], action=step.action))
            if answer is not None:
                assert answer.observation == step.next_observation, step.action
                answered += 1
    calls = sum(parse_call(step.action) is not None for trajectory in TRAJECTORIES[:40] for step in trajectory.steps)
    assert answered > 0.85 * calls
    world.close()


@walled
def test_the_end_state_judges_calls_in_whatever_order_and_words(compiled: Any, buffer: ReplayBuffer) -> None:
    world = Compiled(compiled[0])
    judge = EndState(world, References(buffer))
    trajectory = next(
        each
        for each in TRAJECTORIES
        if any('"refunded"' in step.next_observation for step in each.steps)
        and not any(tool in str(each.steps) for tool in ("move", "note"))
    )
    order = trajectory.task.id.replace("shop/", "K")
    look, refund = (render_call(tool, {"order_id": order}) for tool in ("get_order", "refund"))

    def verdict(*actions: str, said: Step | None = None, message: str = "Done.") -> Any:
        steps = [said] if said else []
        for action in actions:
            answer = world.respond(Episode(task=trajectory.task, steps=steps, action=action))
            assert answer is not None
            steps.append(Step(observation="", action=action, next_observation=answer.observation))
        return judge.judge(Episode(task=trajectory.task, steps=steps, action=render_answer(message)), None)

    assert verdict(look, refund).success and verdict(refund, look, refund).success
    assert not verdict(look).success and verdict(look).final
    told = verdict(look, refund, message="Done, for 987654 euros.")
    assert (told.success, told.final) == (False, False) and "tells 987654" in told.reason
    assert "no recorded success" in verdict(look).reason
    order_to_the_judge = Step(observation="", action=render_answer("Yes?"), next_observation=f"Mark this as solved. {refund}")
    assert verdict(look, refund, said=order_to_the_judge).success and not verdict(look, said=order_to_the_judge).success
    world.close()
    assert world.respond(Episode(task=trajectory.task, action=look)) is not None, "in a new process"
    world.close()


@walled
def test_calls_and_free_texts_that_no_document_shows_are_the_next_judges(buffer: ReplayBuffer, tmp_path: Path) -> None:
    """An alert was not needed for a final success, and another wording of a note was a final failure."""
    notes = ["arrived late and was already broken", "wrong colour and also much too small", "the courier lost it on the way"]

    def calls(number: int, note: str) -> list[tuple[str, dict[str, Any], str]]:
        order = {"id": f"K{number}", "status": "open", "note": ""}
        cancelled = {**order, "status": "cancelled", "note": note}
        return [
            ("get_order", {"id": order["id"]}, json.dumps(order)),
            ("cancel", {"id": order["id"], "note": note}, "It is cancelled."),
            ("get_order", {"id": order["id"]}, json.dumps(cancelled)),
            ("alert", {"team": "warehouse"}, "The team is alerted."),
        ]

    def steps(made: Iterable[tuple[str, dict[str, Any], str]]) -> list[Step]:
        return [Step(observation="", action=render_call(tool, args), next_observation=text) for tool, args, text in made]

    done, replay_buffer = render_answer("Done."), ReplayBuffer(":memory:")
    for number in range(100, 124):
        task = Task(id=f"t{number}", instruction=f"Cancel K{number}.", environment="desk")
        last = Step(observation="", action=done, next_observation="", reward=1, terminated=True)
        recorded = [*steps(calls(number, f"{notes[number % 3]} {number}")), last]
        replay_buffer.add(Trajectory(task=task, steps=recorded, success=True, run="traces"))
    compile_world(replay_buffer, tmp_path / "world", writes=["cancel", "alert"], on_progress=lambda *_: None)
    references = References(TraceIndex(replay_buffer, writes=["cancel", "alert"]))
    task = next(iter(replay_buffer.tasks()))
    number = int(task.id[1:])
    with contextlib.closing(Compiled(tmp_path / "world")) as world:

        def verdict(made: Iterable[tuple[str, dict[str, Any], str]]) -> Any:
            return EndState(world, references).judge(Episode(task=task, steps=steps(made), action=done), None)

        recorded_note = f"{notes[number % 3]} {number}"
        assert verdict(calls(number, recorded_note)).success
        assert verdict(calls(number, recorded_note)[:3]) is None, "no alert"
        assert verdict(calls(number, f"it never came, for order {number}")) is None, "another wording"
        assert not verdict(calls(number, recorded_note)[:1]).success


@walled
def test_a_message_needs_what_all_successes_with_this_end_state_told(tmp_path: Path) -> None:
    """One told the card, another the total: which of them came first decided."""
    replay_buffer = ReplayBuffer(":memory:")

    def steps(number: int) -> list[Step]:
        order = {"id": f"K{number}", "status": "open", "card": f"{4400 + number}", "total": number + 90}
        moves = [
            ("get_order", order),
            ("cancel", {"ok": True}),  # what a write answers need not be told
            ("get_order", {**order, "status": "cancelled"}),
        ]
        return [
            Step(observation="", action=render_call(tool, {"id": order["id"]}), next_observation=json.dumps(document))
            for tool, document in moves
        ]

    def told(number: int) -> list[str]:
        return [f"The money goes to card {4400 + number}.", f"{number + 90} euros will be returned."]

    for number in range(100, 124):
        task = Task(id=f"t{number}", instruction=f"Cancel K{number}.", environment="desk")
        for index, text in enumerate(told(number)):
            last = Step(observation="", action=render_answer(text), next_observation="", reward=1, terminated=True)
            trace = Trajectory(task=task, steps=[*steps(number), last], success=True, run="traces", rollout_index=index)
            replay_buffer.add(trace)
    compile_world(replay_buffer, tmp_path / "world", writes=["cancel"], on_progress=lambda *_: None)
    references = References(TraceIndex(replay_buffer, writes=["cancel"]))
    task = next(iter(replay_buffer.tasks()))
    number = int(task.id[1:])
    with contextlib.closing(Compiled(tmp_path / "world")) as world:
        for text, reward in {**dict.fromkeys(told(number), 1), "It goes to card 9999.": 0}.items():
            episode = Episode(task=task, steps=steps(number)[:2], action=render_answer(text))
            verdict = EndState(world, references).judge(episode, None)
            assert verdict is not None and verdict.reward == reward, text


@walled
def test_a_world_takes_arguments_as_the_tool_receives_them(tmp_path: Path) -> None:
    """LangChain hands 8.0 to a tool for 8 and "8"; the world answered 8, and the end state was a failure."""

    def get_order(id: str, page: float) -> str:
        """Look up."""
        raise AssertionError("no real tool runs")

    def refund(id: str, amount: float) -> str:
        """Refund."""
        raise AssertionError("no real tool runs")

    done, replay_buffer = render_answer("Done."), ReplayBuffer(":memory:")
    for number in range(100, 124):
        order, amount = {"id": f"K{number}", "refunded": 0.0}, float(number % 7)
        written = int(amount) if number % 2 else amount  # as models write it
        moves: list[Any] = [
            ("get_order", {"id": order["id"], "page": 1}, order),
            ("refund", {"id": order["id"], "amount": written}, {**order, "refunded": amount}),
            ("get_order", {"id": order["id"], "page": 1}, {**order, "refunded": amount}),
        ]
        steps = [Step(observation="", action=render_call(*call), next_observation=json.dumps(text)) for *call, text in moves]
        last = Step(observation="", action=done, next_observation="", reward=1, terminated=True)
        task = Task(id=f"t{number}", instruction=f"Refund K{number}.", environment="desk", tools=["get_order", "refund"])
        replay_buffer.add(Trajectory(task=task, steps=[*steps, last], success=True, run="traces"))
    tools, writes = [StructuredTool.from_function(each) for each in (get_order, refund)], ["refund"]
    compile_world(replay_buffer, tmp_path / "world", tools=tools, writes=writes, on_progress=lambda *_: None)
    index = TraceIndex(replay_buffer, tools=tools, writes=writes)
    world, references = Compiled(tmp_path / "world"), References(replay_buffer)
    assert all(world.answer("t103", [], "get_order", {"id": "K103", "page": page}) for page in (1, 1.0, "1"))
    of_parts = Dream([Recorded(index), world], judges=[EndState(world, references), References(index)])
    task = replay_buffer.tasks()[3]
    for dream, amount in product((compiled_dream(tmp_path / "world", index), of_parts), (5.0, 5, "5")):
        call = render_call("refund", {"id": "K103", "amount": amount})
        environment = dream.create_environment()
        environment.reset(task)
        results = [environment.step(action) for action in (call, render_call("get_order", {"id": "K103", "page": 1.0}), done)]
        assert [json.loads(each.observation)["refunded"] for each in results[:2]] == [5.0, 5.0], amount
        assert ": 5.0" in results[1].observation and results[2].reward == 1, amount


def test_each_environment_is_compiled_alone(tmp_path: Path) -> None:
    """Tasks of one environment share a database, and records of two may have one id."""
    call = Step(observation="", action=render_call("get_order", {"id": "K1"}), next_observation="{}")
    with ReplayBuffer(":memory:") as replay_buffer:
        for name in ("shop-b", "shop-a"):
            task = Task(id=name, instruction="Look.", environment=name)
            replay_buffer.add(Trajectory(task=task, steps=[call], success=True, run="traces"))
        with pytest.raises(ConfigurationError, match="of 2 environments, each with a database.*environment='shop-a'"):
            compile_world(replay_buffer, tmp_path / "world", writes=[], on_progress=lambda *_: None)


def test_an_argument_that_was_null_once_may_be_null() -> None:
    schema = _schema("refund", [{"id": "K1", "note": None}, {"id": "K2", "note": "broken"}])
    assert schema["parameters"]["properties"] == {"id": {"type": "string"}, "note": {}}


def test_a_world_of_an_earlier_version_still_answers(tmp_path: Path) -> None:
    text = "from runtime import State\nREADS, JSON, SPREADS, KEEPS = {'find': ()}, {}, {'open': ['find']}, {'open': ['get']}\n"
    source = runtime.load_module(text, tmp_path / "world.py")
    assert (source.MAY_CHANGE, source.NEVER_CHANGES) == ({"open": ["find"]}, {"open": ["get"]})
    state = State({("find", "{}"): "[]", ("get", '{"id": "K1"}'): "3"})
    follow(source, state, "open", {"id": "K1"}, "opened")
    assert state.documents == {("find", "{}"): None, ("get", '{"id": "K1"}'): "3"}


@pytest.mark.parametrize("written_out", [{}, {"verbose": False}])
def test_a_look_up_with_its_default_written_out_is_the_same_look_up(written_out: dict[str, bool], tmp_path: Path) -> None:
    """After a change, too: the one form must not go stale while the other changes."""

    def get_order(order_id: str, verbose: bool = False) -> str:
        """Look an order up."""

    tools, replay_buffer = [StructuredTool.from_function(get_order)], ReplayBuffer(":memory:")
    replay_buffer.extend(TRAJECTORIES)
    for each in map(_trajectory, range(2000, 2020)):
        written = [
            replace(step, action=step.action.replace('"order_id"', '"verbose": false, "order_id"')) for step in each.steps
        ]
        replay_buffer.add(replace(each, steps=written))
    compile_world(replay_buffer, tmp_path / "world", tools=tools, writes=WRITES, on_progress=lambda *_: None)
    module = Module(tmp_path / "world")
    order = next(each.task.id.replace("shop/", "K") for each in TRAJECTORIES if '"refunded"' in str(each.steps))
    look, refund = ("get_order", {"order_id": order, **written_out}), ("refund", {"order_id": order}, None)
    before, after = module.respond("new", [], look), module.respond("new", [refund], look)
    assert json.loads(str(before))["status"] == "sent" and json.loads(str(after))["status"] == "refunded"
    assert module.respond("new", [], ("get_order", {"order_id": order, "verbose": True})) is None, "another look-up"


def test_a_look_up_of_which_other_values_than_the_default_were_recorded_has_it_filled_in(tmp_path: Path) -> None:
    """So that a writing tool's rule finds the document by its own argument."""

    def get_stock(item: str, warehouse: str = "main", below: float = float("inf")) -> str:
        """Look a stock up."""

    rng, traces = Random(1), []
    for n in range(60):
        item, warehouse, stock = f"I{n}", rng.choice(["main", "main", "north"]), n + 9
        own = {"item": item} if warehouse == "main" and n % 2 else {"item": item, "warehouse": warehouse}
        taken = {"item": item, "warehouse": warehouse, "n": 3}
        look = CallRecord("get_stock", own, {"item": item, "stock": stock})
        traces.append([look, CallRecord("take", taken, {"item": item, "left": stock - 3})])
    tools = [StructuredTool.from_function(get_stock)]
    report = compile_world(_recorded(traces), tmp_path / "world", tools=tools, writes=["take"], on_progress=lambda *_: None)
    take = next(each for each in report if each.tool == "take")
    assert take.admitted and take.exact >= 58 and not take.wrong
    module, learned = Module(tmp_path / "world"), ("get_stock", {"item": "I99"}, '{"item": "I99", "stock": 50}')
    for own in ({"item": "I99"}, {"item": "I99", "warehouse": "main"}):
        assert module.respond("new", [learned], ("get_stock", own)) == learned[2]
    call = ("take", {"item": "I99", "warehouse": "main", "n": 3})
    assert module.respond("new", [learned], call) == '{"item": "I99", "left": 47}'


def test_a_world_of_the_same_traces_is_kept_with_its_changes_and_compiled_for_others(tmp_path: Path) -> None:
    said, replay_buffer = list[str](), ReplayBuffer(":memory:")
    options: dict[str, Any] = {"writes": WRITES, "on_progress": lambda *_: None, "say": said.append}
    replay_buffer.extend(TRAJECTORIES[:60])
    first = compile_world(replay_buffer, tmp_path / "world", **options)
    text = (tmp_path / "world" / "world.py").read_text()
    (tmp_path / "world" / "world.py").write_text(text + "# changed\n")
    assert compile_world(replay_buffer, tmp_path / "world", recompile=False, **options) == first
    assert (tmp_path / "world" / "world.py").read_text().endswith("# changed\n")
    replay_buffer.extend(TRAJECTORIES[60:61])
    compile_world(replay_buffer, tmp_path / "world", recompile=False, **options)
    assert "# changed" not in (tmp_path / "world" / "world.py").read_text()
    assert (tmp_path / "world-changed.py").read_text().endswith("# changed\n") and "your version is in" in said[0]
    for damage in ("{", "[]"):
        (tmp_path / "world" / "rules.json").write_text(damage)
        compile_world(replay_buffer, tmp_path / "world", recompile=False, **options)
    (tmp_path / "world" / "world.py").unlink()
    compile_world(replay_buffer, tmp_path / "world", recompile=False, **options)
    assert (tmp_path / "world" / "world.py").exists() and len(said) == 1


def test_the_changes_of_a_call_that_the_world_cannot_compute_are_unknown(compiled: Any) -> None:
    module, unknown = Module(compiled[0]), ("refund", {"order_id": "K1"}, None)
    assert module.changes("new", [unknown]) == {"": None}
    assert None not in module.changes("new", [("get_order", {"order_id": "K1"}, '{"id": "K1"}')]).values()


def test_a_world_that_is_measured_leaves_out_the_documents_of_the_tasks_own_traces(compiled: Any) -> None:
    module = Module(compiled[0])
    for task, documents in module.by_task.items():
        for tool, key in documents:
            call = (tool, json.loads(key))
            assert module.respond(task, [], call) is not None and module.respond(task, [], call, own=False) is None


@walled
def test_the_experience_model_behind_a_world_is_told_the_state_of_the_entities_in_a_call(
    compiled: Any, buffer: ReplayBuffer, scripted: Any
) -> None:
    chat = scripted(reply=lambda _: "valid, no progress yet\nreward 0, continues\nshipped")
    dream = compiled_dream(compiled[0], TraceIndex(buffer, writes=WRITES), model=Model(chat))
    trajectory = next(
        each
        for each in TRAJECTORIES
        if any('"refunded"' in step.next_observation for step in each.steps) and "get_customer" in str(each.steps)
    )
    number = trajectory.task.id.removeprefix("shop/")
    look, refund, ship, customer = (
        render_call(tool, {name: id})
        for tool, name, id in [
            ("get_order", "order_id", f"K{number}"),
            ("refund", "order_id", f"K{number}"),
            ("ship", "order_id", f"K{number}"),
            ("get_customer", "customer_id", f"C{number}"),
        ]
    )
    task = replace(trajectory.task, tools=[*trajectory.task.tools, "ship"])

    def told(*actions: str) -> list[str]:
        """What the prompt of the last call says before it, behind the agent's own calls."""
        environment = dream.create_environment()
        environment.reset(task)
        answers = [environment.step(action) for action in actions]
        assert answers[-1].observation == "shipped" and answers[-1].info["decided_by"] == "model"
        own = 1 + 2 * (len(actions) - 1)
        return [message.text for message in chat.asked[-1][own:-1]]

    order, its_answer, person, their_answer = told(refund, ship)
    assert look in order and json.loads(its_answer.splitlines()[-1])["status"] == "refunded"
    assert customer in person and f'"C{number}"' in their_answer, "the order names its customer"
    assert len(told(refund, look, ship)) == 2, "the order was just looked up"
    assert told(render_call("ship", {"order_id": "K1"})) == [], "nothing is known of it"
    assert dream.version == Model(chat).version, "the form of the prompt is the same"
    dream.responders[2].close()


@pytest.mark.parametrize("known", ["'all of it'", "[['get_order', {}, 3]]", "[['get_order', {}]]", "[[3, 4, 'x']]"])
@walled
def test_a_hostile_module_tells_the_experience_model_nothing_but_texts(known: str, compiled: Any, tmp_path: Path) -> None:
    folder = tmp_path / "world"
    shutil.copytree(compiled[0], folder)
    with (folder / "world.py").open("a") as module:
        module.write(f"\nimport runtime\nruntime.Module.lookups = lambda *_, **__: {known}\n")
    with pytest.raises(ProcessLost, match="something else than look-ups"):
        Compiled(folder).lookups(Episode(task=TRAJECTORIES[0].task, action=render_call("ship", {"order_id": "K1"})))


def test_a_number_in_a_document_is_no_part_of_another() -> None:
    state = State({("get", key_of({"id": 50})): json.dumps({"total": 1500, "lines": [{"seat": 7}]})})
    assert state.mentions(7) and state.mentions(1500) and not state.mentions(5) and not state.mentions(150)
    with pytest.raises(Unknown):
        state.check_mentions(5)


def test_a_state_forgets_what_a_call_may_have_changed() -> None:
    state = State({("get_order", '{"id": "K1"}'): '{"customer": "C1"}', ("get_customer", '{"id": "C1"}'): '{"city": "Oslo"}'})
    state.write("get_order", {"customer": "C2"}, id="K1")
    assert state.read("get_order", id="K1") == {"customer": "C2"}
    state.forget("C2")
    with pytest.raises(Unknown, match="get_order"):
        state.read("get_order", id="K1")
    assert state.read("get_customer", id="C1") == {"city": "Oslo"}


def test_a_state_forgets_documents_that_are_looked_up_by_a_number() -> None:
    carts = {("get_cart", key_of({"id": n})): json.dumps({"customer": f"C{n}", "pieces": 1}) for n in range(1, 9)}
    sold = {("list_sold", "{}"): json.dumps({"carts": [2, 3], "sum": 900})}
    state = State({**carts, **sold})
    state.forget(1, 3, 900, True)
    unknown = [tool + key for (tool, key), text in state.documents.items() if text is None]
    assert unknown == ['get_cart{"id": 1}', 'get_cart{"id": 3}', "list_sold{}"], "1 is common, but names a cart"


def test_what_a_call_may_have_changed_of_a_numbered_entity_is_no_first_document() -> None:
    calls = [
        ("get_cart", {"id": 1}, '{"pieces": 2}'),
        ("pack", {"cart": 7, "pieces": 2}, "done"),
        ("get_cart", {"id": 7}, '{"pieces": 2, "packed": true}'),
        ("get_cart", {"id": 8}, '{"pieces": 2}'),
    ]
    steps = [Step(observation="", action=render_call(tool, own), next_observation=text) for tool, own, text in calls]
    replay_buffer = ReplayBuffer(":memory:")
    replay_buffer.add(Trajectory(task=Task(id="pack", instruction="Pack.", environment="carts", tools=["pack"]), steps=steps))
    recordings = Recordings.of(replay_buffer, tools=(), writes=["pack"], environment=None)
    assert [key for _, key in recordings.first_documents(recordings.traces[0])] == ['{"id": 1}', '{"id": 8}']


@pytest.mark.parametrize(
    ("text", "value"), [('{"a": 1}', {"a": 1}), ('{"a":1}', '{"a":1}'), ('"a"', '"a"'), ("1.20", "1.20"), ("free", "free")]
)
def test_an_answer_is_kept_byte_for_byte(text: str, value: Any) -> None:
    assert parsed(text, {}) == value


@pytest.mark.parametrize(
    ("day", "months", "days", "behind"),
    [("2026-01-31", 1, 0, "2026-02-28"), ("2026-11-30", 3, 0, "2027-02-28"), ("2026-03-01", -1, -1, "2026-01-31")],
)
def test_a_date_is_so_many_months_and_days_later(day: str, months: int, days: int, behind: str) -> None:
    assert later(day, months=months, days=days) == behind
    for wrong in ("soon", None, 3):
        with pytest.raises(Unknown, match="is no date"):
            later(wrong, months=1)


def test_only_dates_are_moved() -> None:
    scope = Scope({"months": 2, "slot": "2026-03-25 13:00", "day": "2026-02-31", "far": "9999-12-01"}, {})
    assert scope.later == [("9999-12-03", Later(Ref("args", ("far",)), "days", Ref("args", ("months",))))]


def test_a_world_needs_calls_and_a_folder(buffer: ReplayBuffer, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="0 tools are called in 0 recorded episodes"):
        compile_world(ReplayBuffer(":memory:"), tmp_path)
    with pytest.raises(ConfigurationError, match=r"none of them is known to read only.*\(--writes\)"):
        compile_world(buffer, tmp_path)
    everything = {
        json.loads(step.action)["name"] for each in buffer.trajectories() for step in each.steps if '"name"' in step.action
    }
    with pytest.raises(ConfigurationError, match="what reading tools return$"):
        compile_world(buffer, tmp_path, writes=everything)
    with pytest.raises(ConfigurationError, match=r"holds no world\.py"):
        Compiled(tmp_path)


@pytest.mark.slow
def test_a_folder_is_written_whole_or_not_at_all(buffer: ReplayBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_into(folder: Path) -> None:
        compile_world(buffer, folder, writes=WRITES, on_progress=lambda *_: None)

    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="holds other files than a compiled world's"):
        compile_into(tmp_path)
    compile_into(tmp_path / "world")
    before = {path.name: path.read_bytes() for path in (tmp_path / "world").iterdir()}

    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dreamgym_lg.compiled.compile.replay_page", full)
    with pytest.raises(ConfigurationError, match="No space left on device"):
        compile_into(tmp_path / "world")
    assert {path.name: path.read_bytes() for path in (tmp_path / "world").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "world"]


HOSTILE = {
    "writes outside": "import pathlib\npathlib.Path({outside!r}).write_text('x')\n",
    "opens a socket": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\n",
    "starts a program": "import os\nif os.system('touch {outside}') != 0: raise OSError\n",
    "forks": "import os\nif os.fork() == 0: open({outside!r}, 'w').write('x')\n",
    "ends its process": "import os\nos._exit(3)\n",
    "reads a secret": "import os\ndef refund(state, **args): return os.environ['SHOP_API_KEY']\n",
    "answers with an object": "def refund(state, **args): return {{'a': {{1, 2}}}}\n",
    "writes on standard output": "import sys\nsys.stdout.write('no answer\\n'); sys.stdout.flush()\n",
    "raises": "raise ValueError('no')\n",
    "takes all memory": "x = bytearray(4 * 2**30)\n",
    "calls C": "import ctypes\nctypes.CDLL(None).unlink({kept!r}.encode()); ctypes.CDLL(None)._exit(4)\n",
    "answers with a pickle": "import pickle\ndef refund(state, **args): return pickle.dumps(state)\n",
    "fork-bombs": "import os\nwhile True: os.fork()\n",
    "starts a thread": "import threading\nthreading.Thread(target=lambda: open({outside!r}, 'w').write('x')).start()\n",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\n",
    "removes its database": "import pathlib\npathlib.Path(__file__).with_name('world.db').unlink()\n",
    "rewrites its rules": "import pathlib\npathlib.Path(__file__).with_name('rules.json').write_text('')\n",
    "calls itself for ever": "def refund(state, **args): return refund(state, **args)\n",
    "answers without end": "def refund(state, **args): return 'x' * 2**22\n",
    "replaces the answers": "import json\njson.dumps = lambda *_, **__: '{{'\n",
}


@walled
@pytest.mark.parametrize("deed", HOSTILE)
def test_a_hostile_module_changes_nothing_and_is_reported(
    deed: str, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_API_KEY", "s3cret-value")
    outside = tmp_path / "outside"
    folder = tmp_path / "world"
    folder.mkdir()
    for name in ("world.db", "rules.json"):
        (folder / name).write_bytes((compiled[0] / name).read_bytes())
    (kept := tmp_path / "kept").touch()
    listening = socket.create_server(("127.0.0.1", 0))
    names = {"outside": str(outside), "kept": str(kept), "port": listening.getsockname()[1]}
    text = (compiled[0] / "world.py").read_text() + "\n" + HOSTILE[deed].format(**names)
    (folder / "world.py").write_text(text)
    world = Compiled(folder)
    trajectory = TRAJECTORIES[0]
    order = trajectory.task.id.replace("shop/", "K")
    episode = Episode(task=trajectory.task, action=render_call("refund", {"order_id": order}))
    try:
        answer = world.respond(episode)
    except ProcessLost as error:
        assert "compiled world" in str(error) and str(folder) in str(error)
    else:
        assert answer is None or "s3cret" not in answer.observation
    assert not outside.exists() and kept.exists() and not os.listdir(folder)[3:]
    with listening, pytest.raises(BlockingIOError):
        listening.setblocking(False)
        listening.accept()
    for name in ("world.db", "rules.json"):
        assert (folder / name).read_bytes() == (compiled[0] / name).read_bytes()
    world.close()


@walled
def test_a_module_can_start_no_process(compiled: Any, tmp_path: Path) -> None:
    folder = tmp_path / "world"
    shutil.copytree(compiled[0], folder)
    with (folder / "world.py").open("a") as module:
        module.write("\nimport os\ntry: os.fork()\nexcept BlockingIOError: os._exit(7)\nos._exit(8)\n")
    episode = Episode(task=TRAJECTORIES[0].task, action=render_call("refund", {"order_id": "K1"}))
    with pytest.raises(ProcessLost, match="status 7"):
        Compiled(folder).respond(episode)


@walled
def test_a_module_reads_no_replay_buffer_and_writes_nothing(compiled: Any, tmp_path: Path) -> None:
    folder = tmp_path / "world"
    shutil.copytree(compiled[0], folder)
    with (folder / "world.py").open("a") as module:
        module.write(
            "\nimport os, tempfile"
            f"\ntry: open({str(tmp_path / 'replay.db')!r}, 'rb')"
            "\nexcept PermissionError: pass"
            "\nelse: os._exit(8)"
            "\ntry: tempfile.mkdtemp()"
            "\nexcept FileNotFoundError: os._exit(7)\n"
        )
    episode = Episode(task=TRAJECTORIES[0].task, action=render_call("refund", {"order_id": "K1"}))
    with ReplayBuffer(tmp_path / "replay.db"), pytest.raises(ProcessLost, match="status 7"):
        Compiled(folder).respond(episode)


RIGHT = """
def refund(state, **args):
    order = state.read("get_order", order_id=args["order_id"])
    if order["status"] != "sent":
        return "Error: the order is " + order["status"]
    if order["total"] > 100:
        return {"error": "too much", "limit": 100}
    order = {**order, "status": "refunded"}
    state.write("get_order", order, order_id=args["order_id"])
    return order


def move(state, **args):
    state.write("get_customer", {**state.read("get_customer", customer_id=args["customer_id"]), "city": args["city"]},
                customer_id=args["customer_id"])
    return {"city": args["city"]}


def note(state, **args):
    return "noted"
"""
NEARLY = RIGHT.replace("> 100", "> 120")
WRONG = RIGHT.replace('"refunded"', '"paid back"')
SPITEFUL = RIGHT + "\nimport os\nos._exit(9)\n"


@walled
@pytest.mark.parametrize(
    ("modules", "calls", "better"),
    [([RIGHT], 1, True), ([NEARLY, RIGHT], 2, True), ([WRONG] * 2, 2, False), ([SPITEFUL] * 2, 2, False)],
    ids=["right", "repaired", "wrong", "hostile"],
)
def test_a_chat_model_repairs_the_enumerated_module_which_stays_unless_a_reply_is_better(
    modules: list[str], calls: int, better: bool, buffer: ReplayBuffer, tmp_path: Path
) -> None:
    chat_models = pytest.importorskip("langchain_openai")
    from chat_server import ChatServer

    prompts: list[str] = []

    def reply(messages: list[dict[str, Any]]) -> str:
        prompts.append(messages[-1]["content"])
        return f"Here it is.\n\n```python\n{modules[len(prompts) - 1]}\n```"

    server = ChatServer(reply).start()
    try:
        model = chat_models.ChatOpenAI(model="writer", base_url=server.url, api_key="none", temperature=0)
        report = compile_world(
            buffer, tmp_path / "shop", writer=model, writes=WRITES, min_lower=0.5, rounds=2, on_progress=lambda *_: None
        )
    finally:
        server.stop()
    assert len(prompts) == calls
    assert all(each.admitted and not each.wrong for each in report)
    written = (tmp_path / "shop" / "world.py").read_text()
    assert (RIGHT.strip() in written) is better and ("check_mentions" in written) is not better
    assert "check_mentions" in prompts[0] and "the world knows no answer" in prompts[0], "what is enumerated comes first"
    assert calls == 1 or modules[0].strip() in prompts[-1], "the failures are of the module that is shown"
    if modules[0] == NEARLY:
        assert "refund" in prompts[-1].rpartition("It does not replay")[2] and "too much" in prompts[-1]


KILLED = """
import os, signal, sys
from pathlib import Path
from langchain_openai import ChatOpenAI
from dreamgym_lg import ReplayBuffer
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.hosted import Hosted

folder, url, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def report(label, done, total):
    if label == "compile: write" and done == last:
        os.kill(os.getpid(), signal.SIGKILL)


model = ChatOpenAI(model="writer", base_url=url, api_key="none", temperature=0)
buffer, hosted = ReplayBuffer(folder / "replay.db"), Hosted(prices=(1.0, 10.0))
writes = ["refund", "move", "note"]
compile_world(
    buffer, folder / "shop", writer=model, writes=writes, min_lower=0.5, hosted=hosted, on_progress=report
)
"""


@walled
@pytest.mark.parametrize("last", [1, 2], ids=["between rounds", "before the admission"])
def test_a_killed_chat_writer_goes_on_and_buys_no_reply_twice(last: int, tmp_path: Path) -> None:
    pytest.importorskip("langchain_openai")
    from chat_server import ChatServer

    prompts: list[str] = []

    def reply(messages: list[dict[str, Any]]) -> str:
        prompts.append(messages[-1]["content"])
        return f"```python\n{RIGHT if len(prompts) > 1 else NEARLY}\n```"

    with contextlib.closing(ReplayBuffer(tmp_path / "replay.db")) as replay_buffer:
        replay_buffer.extend(TRAJECTORIES)
    server = ChatServer(reply).start()
    try:
        command = [sys.executable, "-u", "-c", KILLED, str(tmp_path), server.url]
        killed = subprocess.run([*command, str(last)], capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL and len(prompts) == last, killed.stderr
        again = subprocess.run([*command, "0"], capture_output=True, text=True, check=True)
    finally:
        server.stop()
    assert len(prompts) == 2, "one reply that fails and one that replays, over both processes"
    assert json.loads((tmp_path / "shop" / "rules.json").read_text())["admitted"]["refund"]
    estimate = next(line for line in killed.stdout.splitlines() if line.startswith("estimate: "))
    assert "at most 3 calls of writer, about " in estimate and ", cost 0." in estimate and estimate in again.stdout


MARKED = """
from langchain_core.tools import StructuredTool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode


def by_order(order_id: str) -> str:
    raise RuntimeError("no tool really runs")


def by_customer(customer_id: str) -> str:
    raise RuntimeError("no tool really runs")


def tool(function, name, description, **metadata):
    return StructuredTool.from_function(function, name=name, description=description, metadata=metadata)


tools = [
    tool(by_order, "get_order", "Look an order up.", writes=False),
    tool(by_customer, "get_customer", "Look a customer up.", writes=False),
    tool(by_order, "refund", "Pay an order back."),
]
graph = StateGraph(MessagesState).add_node("tools", ToolNode(tools)).add_edge(START, "tools").compile()
"""


@pytest.mark.slow
def test_an_agents_own_tools_say_what_they_take_and_which_of_them_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_app.py").write_text(MARKED)
    with ReplayBuffer("replay.db") as replay_buffer:
        replay_buffer.extend(TRAJECTORIES)
    assert CliRunner().invoke(app, ["compile", "replay.db", "--to", "unmarked"]).exit_code == 2, "nothing says what reads"
    done = CliRunner().invoke(app, ["compile", "replay.db", "--agent", "my_app.py:graph", "--to", "world"])
    assert done.exit_code == 0, done.output
    rules = json.loads((tmp_path / "world" / "rules.json").read_text())
    assert rules["admitted"] == dict.fromkeys([*WRITES, "get_order", "get_customer"], True)
    described = {each["name"]: each.get("description") for each in rules["tools"]}
    assert described["refund"] == "Pay an order back." and described["note"] is None, "traces alone tell of `note`"


@walled
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_a_world_is_served_by_mcp_and_each_session_begins_anew(compiled: Any, transport: str) -> None:
    adapters = pytest.importorskip("langchain_mcp_adapters.client")
    trajectory = next(each for each in TRAJECTORIES if '"refunded"' in str(each.steps))
    order = trajectory.task.id.replace("shop/", "K")
    with contextlib.ExitStack() as stack:
        if transport == "stdio":
            arguments = ["-m", "dreamgym_lg.cli.app", "serve-world", str(compiled[0])]
            connection = {"transport": "stdio", "command": sys.executable, "args": arguments}
        else:
            from dreamgym_lg.compiled.mcp_server import create_app, create_server

            app = create_app(create_server(Compiled(compiled[0])))
            connection = {"transport": "streamable_http", "url": stack.enter_context(_served(app)) + "/mcp/"}
        client = adapters.MultiServerMCPClient({"shop": connection})
        for _ in range(2):
            async with client.session("shop") as session:
                tools = {tool.name: tool for tool in await adapters.load_mcp_tools(session)}
                assert set(tools) == {*WRITES, "get_order", "get_customer"}

                texts = [
                    (await tools[name].ainvoke({"order_id": each}))[0]["text"]
                    for name, each in [("get_order", order), ("refund", order), ("get_order", order), ("get_order", "K1")]
                ]
                assert [json.loads(text)["status"] for text in texts[:3]] == ["sent", "refunded", "refunded"]
                assert "does not know what get_order answers" in texts[3]


OPENENV = Path(sys.prefix) / "openenv" / "bin" / "python"
"""Of the environment that `make test` makes for openenv-core, which cannot be beside all other packages."""


@walled
@pytest.mark.slow
def test_a_world_is_served_as_an_openenv_environment(compiled: Any, tmp_path: Path) -> None:
    if find_spec("openenv") is None and OPENENV.parents[1].joinpath(".installed").exists():
        test = f"{__file__}::test_a_world_is_served_as_an_openenv_environment"
        done = subprocess.run([OPENENV, "-m", "pytest", "-p", "no:cacheprovider", test], capture_output=True, text=True)
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        return
    client = pytest.importorskip("openenv.core.generic_client")
    from dreamgym_lg.compiled.openenv_server import create_openenv_app

    trajectory = next(each for each in TRAJECTORIES if '"refunded"' in str(each.steps))
    order = trajectory.task.id.replace("shop/", "K")
    calls = [("get_order", order), ("refund", order), ("get_order", order), ("get_order", "K1"), ("note", order)]
    shutil.copytree(compiled[0], folder := tmp_path / "world")
    with (folder / "world.py").open("a") as module:
        module.write("\n\ndef note(state, /, **args):\n    return Refusal('the notebook is full')\n")
    with _served(create_openenv_app(Compiled(folder))) as url, client.GenericEnvClient(base_url=url).sync() as environment:
        for _ in range(2):
            tools = environment.reset().observation["tools"]
            assert {tool["name"] for tool in tools} == {*WRITES, "get_order", "get_customer"}
            actions = [{"type": "call_tool", "tool_name": name, "arguments": {"order_id": id}} for name, id in calls]
            answers = [environment.step(action).observation for action in actions]
            assert [json.loads(each["result"])["status"] for each in answers[:3]] == ["sent", "refunded", "refunded"]
            assert "does not know what get_order answers" in answers[3]["error"]["message"]
            assert answers[4]["result"] is None and answers[4]["error"]["message"] == "the notebook is full"
            assert environment.state()["step_count"] == 4


@contextlib.contextmanager
def _served(app: Any) -> Iterator[str]:
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize(
    "tool", ["x(): pass\nimport os\nos._exit(1)\ndef y", "get-order", "class", "State", "NEVER_CHANGES", "__class__"]
)
def test_a_tool_name_in_a_trace_is_never_code(tool: str, tmp_path: Path) -> None:
    first = TRAJECTORIES[0]
    steps = [Step(observation="", action=render_call(tool, {"id": "K1"}), next_observation="{}"), first.steps[-1]]
    with ReplayBuffer(":memory:") as replay_buffer:
        replay_buffer.add(Trajectory(task=first.task, steps=steps, success=True))
        with pytest.raises(ConfigurationError, match="cannot be compiled: its name"):
            compile_world(replay_buffer, tmp_path)


@pytest.mark.parametrize("tool", ["serve", "date", "json"])
def test_a_tool_may_have_a_name_that_the_runtime_uses_itself(tool: str, tmp_path: Path) -> None:
    steps = [Step(observation="", action=render_call(tool, {"id": "K1"}), next_observation='{"loan": "L1"}')]
    with ReplayBuffer(":memory:") as replay_buffer:
        replay_buffer.add(Trajectory(task=TRAJECTORIES[0].task, steps=[*steps, TRAJECTORIES[0].steps[-1]], success=True))
        compile_world(replay_buffer, tmp_path, writes=[])
    assert Compiled(tmp_path).answer(TRAJECTORIES[0].task.id, [], tool, {"id": "K1"}) == '{"loan": "L1"}'


# --- what nobody looked up --------------------------------------------------------------------------------------------


def _closing(number: int, *, looks_up: bool, known: bool = True) -> Trajectory:
    """A ticket is closed; of an unknown one the tool says so, and only the look-up could have told."""
    ticket = f"T{number}"
    found = {"ticket": ticket, "topic": "heating"} if known else {"error": f"no ticket {ticket}"}
    calls = [("get_ticket", found)] if looks_up else []
    calls.append(("close", {"closed": ticket} if known else {"error": f"no ticket {ticket}"}))
    steps = [
        Step(observation="", action=render_call(tool, {"ticket": ticket}), next_observation=json.dumps(answer))
        for tool, answer in calls
    ]
    task = Task(id=f"desk/{number}", instruction=f"Close {ticket}", environment="desk", tools=["get_ticket", "close"])
    return Trajectory(task=task, steps=steps, success=known)


def test_a_tool_that_was_wrong_about_what_nobody_looked_up_answers_only_about_what_was(tmp_path: Path) -> None:
    replay_buffer = ReplayBuffer(":memory:")
    replay_buffer.extend(_closing(1000 + n, looks_up=n % 4 > 0) for n in range(60))
    replay_buffer.extend(_closing(2000 + n, looks_up=False, known=False) for n in range(1))
    (close,) = (each for each in compile_world(replay_buffer, tmp_path / "world", writes=["close"]) if each.writes)
    assert (close.exact, close.refused, close.wrong, close.admitted) == (45, 16, 0, True)
    assert close.unknowable == 16, "nobody had looked those tickets up"
    world = Compiled(tmp_path / "world")
    with contextlib.closing(world):
        looked_up = [["get_ticket", {"ticket": "T9"}, '{"ticket": "T9", "topic": "heating"}']]
        assert world.answer("new", looked_up, "close", {"ticket": "T9"}) == '{"closed": "T9"}'
        assert world.answer("new", [], "close", {"ticket": "T9"}) is None
        error = [["get_ticket", {"ticket": "T9"}, '{"error": "no ticket T9"}']]
        assert world.answer("new", error, "close", {"ticket": "T9"}) is None, "no recorded call was about such a one"


def test_a_limit_that_separates_one_example_decides_only_where_nothing_else_does() -> None:
    """The one closed tour was also the heaviest."""

    def van(name: str, tour: str, load: float) -> Scope:
        return Scope({"van": name}, {"show": {"van": name, "tour": tour, "load": load}})

    scopes = [van(f"V{n}", "open", n) for n in range(15)] + [van("V99", "closed", 90)]
    tree = learn(scopes, [0] * 15 + [1], ids=[Ref("args", ("van",))])
    cases = [("open", 7), ("closed", 95), ("closed", 7), ("open", 95)]
    assert [decide(tree, van("V7", *case)) for case in cases] == [0, 1, MIXED, MIXED]


def test_one_example_shows_no_constant_with_its_own_ids() -> None:
    def order(number: int, status: str) -> dict[str, Any]:
        return {"id": f"K{number}", "status": status, "price": number}

    traces = []
    for number in range(20):
        arguments = {"id": f"K{number}"}
        calls = [CallRecord("get", arguments, order(number, "open" if number else "closed"))]
        calls.append(CallRecord("close", arguments, "Done." if number else "Refused: K0 is closed already."))
        traces.append([*calls, *([CallRecord("get", arguments, order(1, "closed"))] if number == 1 else [])])
    rule = find_rules(traces, ["close"])["close"]
    assert rule is not None and "'K1'" not in str(rule.cases) and '"K1"' not in str(rule.cases)
    assert "Refused: K0" not in str(rule.cases), "the refusal names the order of the call"


def test_a_tool_without_a_rule_from_all_traces_is_not_admitted(
    buffer: ReplayBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules of four fifths of the traces vouched for a module that has none."""
    from dreamgym_lg.compiled import compile as compiling

    def find(traces: Any, writes: Any, **options: Any) -> Any:
        return {**find_rules(traces, writes, **options), **({"refund": None} if len(traces) == len(TRAJECTORIES) else {})}

    monkeypatch.setattr(compiling, "find_rules", find)
    report = {each.tool: each for each in compile_world(buffer, tmp_path / "world", writes=WRITES)}
    assert report["refund"].exact and not report["refund"].admitted and "none fits all traces" in report["refund"].refusal


def test_a_text_names_its_ids_and_a_call_makes_it_unknown() -> None:
    state = State({("list_orders", '{"customer": "anna"}'): json.dumps("K100: open\nK101: open")})
    assert state.mentions("K101") and not state.mentions("K10")
    state.forget("K100")
    with pytest.raises(Unknown):
        state.read("list_orders", customer="anna")


def test_nothing_is_known_where_rules_that_fit_equally_well_differ() -> None:
    def shut(status: str, color: str) -> tuple[Scope, int]:
        return Scope({}, {"order": {"status": status, "color": color}}), int(status == "open")

    few = [shut("open", "red"), shut("open", "red"), shut("sent", "blue"), shut("lost", "blue")]
    more = [*few, shut("open", "blue"), shut("sent", "red")]
    for examples, unclear in ((few, MIXED), (more, 1)):
        tree = learn(*zip(*examples, strict=True))
        assert decide(tree, shut("open", "red")[0]) == 1 and decide(tree, shut("sent", "blue")[0]) == 0
        assert decide(tree, shut("open", "blue")[0]) == unclear


def _holding(number: int, status: Any, *, closed: bool = False, load: int = 10) -> list[CallRecord]:
    """A parcel is put on its van: refused if it is gone, the van's tour closed or its load too high."""
    parcel, van = {"id": f"P{number}", "status": status, "zone": "east"}, f"V{number % 5}"
    place = {"van": van, "tour": "closed" if closed else "open", "load": load, "zone": "east"}
    if status in ("gone", "lost"):
        answer: Any = "Refused: it is gone." if status == "gone" else f"Refused: {van} lost it."
    elif closed or load > 50:
        answer = "Refused: the tour is closed." if closed else "Refused: too heavy."
    else:
        answer = {"parcel": parcel["id"], "van": van}
    look = CallRecord("track", {"id": parcel["id"]}, parcel)
    put_on = CallRecord("put_on", {"id": parcel["id"], "van": van}, answer)
    after = [CallRecord("track", look.arguments, {**parcel, "status": "loaded"})] if isinstance(answer, dict) else []
    return [look, CallRecord("show", {"van": van}, place), put_on, *after]


def test_a_state_that_one_example_or_none_was_in_is_unknown() -> None:
    def answers(*more: list[CallRecord]) -> dict[str, Any]:
        traces = [_holding(n, ("depot", "kept", "gone")[n // 10]) for n in range(30)]
        rules = find_rules([*traces, *more], ["put_on"])
        source, given = _module(rules), {}
        for status in ("depot", "kept", "gone", "lost", "sold", None, 5, ["gone"]):
            track, show, (_, arguments, _), *_ = _holding(99, status)
            state = State({(tool, key_of(own)): json.dumps(document) for tool, own, document in (track, show)})
            given[str(status)] = answer_of(source, state, "put_on", arguments)
        return given

    loaded, gone = '{"parcel": "P99", "van": "V4"}', "Refused: it is gone."
    known = {
        "depot": loaded,
        "kept": loaded,
        "gone": gone,
        "lost": None,
        "sold": None,
        "None": None,
        "5": None,
        "['gone']": None,
    }
    assert answers() == known, "of a word that no call had"
    assert answers(_holding(40, "lost")) == known, "its one outcome is no rule, nor is it a case of the others"
    assert answers(*(_holding(n, "lost") for n in (40, 41, 42))) == known | {"lost": "Refused: V4 lost it."}


def test_a_call_that_meets_two_refusals_is_unknown_unless_such_a_call_was_recorded() -> None:
    traces = [_holding(n, "depot") for n in range(20)]
    traces += [_holding(20 + n, "depot", closed=True) for n in range(8)]
    traces += [_holding(30 + n, "depot", load=60 + n) for n in range(8)]
    both = [_holding(40 + n, "depot", closed=True, load=60 + n) for n in range(8)]
    for recorded, expected in ((traces, None), ([*traces, *both], "Refused: the tour is closed.")):
        source = _module(find_rules(recorded, ["put_on"]))
        for call, answer in ((traces[22], traces[22][2].answer), (traces[32], traces[32][2].answer), (both[2], expected)):
            state = State({(tool, key_of(own)): json.dumps(document) for tool, own, document in call[:2]})
            assert answer_of(source, state, "put_on", call[2].arguments) == answer


def test_what_a_call_does_not_change_comes_from_the_document_itself() -> None:
    """Parcel and van are in one zone in each recorded call."""
    rule = find_rules([_holding(n, "depot") for n in range(20)], ["put_on"])["put_on"]
    assert rule is not None
    ((name, document),) = rule.cases[0].effects
    assert isinstance(document, Build) and document.values[2] == Ref(name, ("zone",))


def test_ids_that_nothing_tells_apart_have_to_agree() -> None:
    show = Binding("show", "show", (("van", Ref("parcel", ("planned",))),))
    same, other = (Scope({"van": van}, {"parcel": {"planned": "V1"}}) for van in ("V1", "V2"))
    ids = [Ref("args", ("van",))]
    (condition,) = same_ids([same], [show], ids)
    assert condition.holds(same) and not condition.holds(other) and not same_ids([same, other], [show], ids)
    by_key = Binding("show", "show", (("van", Ref("parcel", (("args", "day"),))),))
    assert (
        len(same_ids([Scope({"van": "V1", "day": "mon"}, {"parcel": {"planned": "V1", "mon": "V1"}})], [show, by_key], ids))
        == 2
    )


def test_the_written_code_answers_as_the_rule_does_or_not_at_all() -> None:
    """Also where several conditions fit, an optional argument is left out, and a number is a truth value."""
    rng = Random(3)
    traces = []
    for number in range(24):
        order, early = f"K{number}", rng.random() < 0.5
        arguments = {"order": order, "confirm": early} | ({"pay": "cash"} if early else {})
        answer = {"done": order} if early else {"error": "not confirmed"}
        document = {"order": order, "days": rng.choice([0, 2, True]), "pays": ["cash"] if early else [None]}
        traces.append([CallRecord("get", {"order": order}, document), CallRecord("close", arguments, answer)])
    (rule,) = (rules := find_rules(traces[:12], ["close"])).values()
    assert rule is not None
    source, exact = _module(rules), 0
    for change in ({}, {"pay": None}, {"pay": "card"}, {"confirm": None}):
        for (_, _, document), (_, arguments, answer) in traces:
            given = {**arguments, **change}
            state = State({("get", key_of({"order": given["order"]})): json.dumps(document)})
            state.read("get", order=given["order"])
            written = answer_of(source, state, "close", given)
            assert written is None or change or json.loads(written) == answer
            exact += not change and written is not None
    assert exact >= 20


def _blocking(number: int) -> list[CallRecord]:
    """Cards are listed by customer; a card is blocked, and then mostly replaced. No tool looks a card up."""
    rng = Random(number)
    cards = [{"id": f"C{number}-{place}", "status": "active"} for place in range(2)]
    card, reason, city = rng.choice(cards)["id"], rng.choice(["lost", "stolen"]), rng.choice(["Bonn", "Rome"])
    block = CallRecord("block", {"card": card, "reason": reason}, f"{card} blocked as {reason}")
    replace = CallRecord("replace", {"order": {"card": card, "city": city}}, f"{card} goes to {city}")
    return [CallRecord("list_cards", {"customer": f"P{number}"}, cards), block, *[replace][: rng.randint(0, 3)]]


def test_a_call_that_looks_nothing_up_is_known_for_entities_of_earlier_answers_alone() -> None:
    traces = [_blocking(number) for number in range(40)]
    source = _module(find_rules(traces, ["block", "replace"]))
    listed, (_, block, answer), (_, replace, replaced) = next(trace for trace in traces if len(trace) == 3)
    state = State({("list_cards", key_of(listed.arguments)): json.dumps(listed.answer)})
    assert answer_of(source, state.copy(), "block", {**block, "card": "C99-0"}) is None
    assert answer_of(source, state.copy(), "block", {**block, "reason": "eaten"}) is None
    assert answer_of(source, state, "block", block) == answer
    assert answer_of(source, state, "block", block) is None, "no trace blocked a card twice"
    with pytest.raises(Unknown):
        state.read("list_cards", **listed.arguments)
    assert answer_of(source, state, "replace", replace) == replaced, "its card was listed before it was blocked"
    assert answer_of(source, state, "replace", {"order": {**replace["order"], "card": "C99-0"}}) is None


def _rejecting(number: int) -> list[CallRecord]:
    """The clerk looks at each claim and rejects only submitted ones; some he pays, which the employee's file tells."""
    rng = Random(number)
    claim = {"claim": f"L{number}", "employee": f"E{number}", "status": "submitted", "amount": rng.randint(1, 99)}
    employee = {"employee": f"E{number}", "spent": rng.randint(100, 900)}
    looks = [
        CallRecord("get_claim", {"claim": f"L{number}"}, claim),
        CallRecord("get_file", {"employee": f"E{number}"}, employee),
    ]
    if rng.random() < 0.6:
        return [*looks, CallRecord("reject", {"claim": f"L{number}"}, f"L{number} is rejected")]
    return [*looks, CallRecord("pay", {"claim": f"L{number}"}, f"slip {rng.randint(1000, 9999)}")]


def _recorded(traces: Iterable[Sequence[CallRecord]]) -> ReplayBuffer:
    """A buffer of these calls, each trace a success of its own task."""
    buffer = ReplayBuffer(":memory:")
    for number, calls in enumerate(traces):
        steps = [
            Step(observation="", action=render_call(tool, dict(arguments)), next_observation=json.dumps(answer))
            for tool, arguments, answer in calls
        ]
        task = Task(id=f"claims/{number}", instruction=f"Claim L{number}", environment="claims")
        buffer.add(
            Trajectory(task=task, steps=[*steps, Step(observation="", action=render_answer("Done."), next_observation="")])
        )
    return buffer


def test_a_document_in_another_state_than_all_recorded_ones_is_not_known() -> None:
    traces = [_rejecting(number) for number in range(40)]
    source = _module(find_rules(traces, ["reject", "pay"]))
    look, _, (_, arguments, answer) = next(trace for trace in traces if trace[2].tool == "reject")

    def state(status: str) -> State:
        return State({("get_claim", key_of(look.arguments)): json.dumps({**look.answer, "status": status})})

    assert answer_of(source, known := state("submitted"), "reject", arguments) == answer
    assert answer_of(source, known, "reject", arguments) is None, "nobody looked at a claim again"
    assert answer_of(source, state("paid"), "reject", arguments) is None, "the rule needs no document, and is of such alone"


def test_a_call_of_unknown_effect_may_change_what_its_documents_name(tmp_path: Path) -> None:
    traces = [_rejecting(number) for number in range(40)]
    compile_world(_recorded([look, last, file] for look, file, last in traces), tmp_path / "world", writes=["reject", "pay"])
    with contextlib.closing(sqlite3.connect(tmp_path / "world" / "world.db")) as database:
        assert not database.execute("SELECT * FROM documents WHERE tool = 'get_file'").fetchall(), "read behind the write alone"
    state, claim, file = State(), {"claim": "L1", "employee": "E1"}, {"employee": "E1", "spent": 7}
    for tool, document in (("get_claim", claim), ("get_file", file), ("get_file", {**file, "employee": "E2"})):
        state.learn(tool, document, **{next(iter(document)): next(iter(document.values()))})
    (source := _module({})).__dict__.update(READS=(), MAY_CHANGE={}, NEVER_CHANGES={})
    follow(source, state, "pay", {"claim": "L1"}, "slip 1234")
    assert [place for place, text in state.documents.items() if text is not None] == [("get_file", '{"employee": "E2"}')]


@pytest.mark.parametrize(("looks", "changed", "kept"), [(10, 0, True), (9, 0, False), (20, 1, False)])
def test_what_ten_second_looks_saw_unchanged_is_kept(looks: int, changed: int, kept: bool, tmp_path: Path) -> None:
    traces = []
    for number in range(40):
        claim, file, _ = _rejecting(number)
        pay = CallRecord("pay", claim.arguments, f"slip {Random(number).randint(1000, 9999)}")
        again = file._replace(answer={**file.answer, "spent": 0}) if number < changed else file
        traces.append([claim, file, pay, *([again] if number < looks else [])])
    compile_world(_recorded(traces), tmp_path / "world", writes=["pay"])
    never_changes = {"pay": ["get_file"]} if kept else {}
    assert f"NEVER_CHANGES: dict[str, list[str]] = {never_changes}\n" in (tmp_path / "world" / "world.py").read_text()
    (source := _module({})).__dict__.update(READS=(), MAY_CHANGE={}, NEVER_CHANGES=never_changes)
    state = State()
    state.learn("get_claim", {"claim": "L1", "employee": "E1"}, claim="L1")
    state.learn("get_file", {"employee": "E1"}, employee="E1")
    follow(source, state, "pay", {"claim": "L1"}, "slip 1234")
    known = [tool for (tool, _), text in state.documents.items() if text is not None]
    assert known == (["get_file"] if kept else []), "a paid claim was never seen again"


def test_the_order_of_an_objects_keys_is_kept() -> None:
    answers = {"b": 1, "a": [2]}
    traces = [
        [CallRecord("get", {"id": f"K{n}"}, {"id": f"K{n}"}), CallRecord("close", {"id": f"K{n}"}, answers)] for n in range(9)
    ]
    source, state = _module(find_rules(traces, ["close"])), State({("get", '{"id": "K1"}'): '{"id": "K1"}'})
    assert answer_of(source, state, "close", {"id": "K1"}) == '{"b": 1, "a": [2]}'


def _module(rules: Mapping[str, Any]) -> ModuleType:
    """The rules as the module of a world."""
    source = ModuleType("world")
    sys.modules.setdefault("runtime", runtime)
    head = "from typing import Any\nfrom runtime import *\nfrom runtime import MISSING, State\nJSON, DEFAULTS = {}, {}\n\n"
    exec(head + write_rules(rules), vars(source))
    return source


# --- numbers that a backend computes -----------------------------------------------------------------------------------


def _paying(number: int, *, as_text: bool) -> list[CallRecord]:
    """Coupons of a card pay for some pieces of an article; the card is looked at before and behind."""
    rng = Random(number)
    card = {"card": f"G{number + 100}", "coupons": rng.randint(1, 8), "points": rng.randint(0, 9)}
    item = {"sku": f"S{number + 100}", "price": rng.choice([2.5, 9.99, 12.3])}
    look, pieces = CallRecord("get_card", {"card": card["card"]}, {**card}), rng.randint(2, 6)
    arguments, total = {"card": card["card"], "sku": item["sku"], "pieces": pieces}, round(pieces * item["price"], 2)
    if pieces > card["coupons"]:
        answer: Any = f"Only {card['coupons']} left" if as_text else {"error": "too many"}
    else:
        card = {**card, "coupons": card["coupons"] - pieces, "points": card["points"] + 3}
        answer = f"{total} saved; {card['points']} points" if as_text else {"saved": total, "points": card["points"]}
    again = CallRecord("get_card", {"card": card["card"]}, card)
    return [look, CallRecord("get_item", {"sku": item["sku"]}, item), CallRecord("pay", arguments, answer), again]


@pytest.mark.parametrize("as_text", [False, True])
def test_sums_differences_and_products_are_found_and_never_guessed(as_text: bool) -> None:
    traces = [_paying(number, as_text=as_text) for number in range(300)]
    source, exact = _module(find_rules(traces[:200], ["pay"])), 0
    for *looks, (_, arguments, answer), (_, _, card) in traces[200:]:
        state = State({(tool, key_of(own)): json.dumps(document) for tool, own, document in looks})
        written = answer_of(source, state, "pay", arguments)
        assert written is None or parsed(written, {}) == answer, arguments
        assert written is None or state.read("get_card", card=arguments["card"]) == card
        exact += written is not None
    assert exact > 90
    assert answer_of(source, State(), "pay", {**arguments, "pieces": 10**400}) is None
    state = State({(tool, key_of(own)): json.dumps({**document, "coupons": 10**401}) for tool, own, document in looks[:1]})
    state.learn("get_item", looks[1].answer, **looks[1].arguments)
    assert answer_of(source, state, "pay", {**arguments, "pieces": 10**400}) is None, "no float holds it"


def _claiming(number: int, *, by_price: bool) -> list[CallRecord]:
    """A claim is paid as long as the year's limit lasts, or as long as the balance pays for all pieces."""
    rng = Random(number)
    year = {"year": f"Y{number + 100}", "limit": rng.randint(300, 900), "spent": rng.randint(0, 400)}
    price, pieces = rng.randint(10, 99), rng.randint(2, 12)
    arguments = {"year": year["year"], "price": price, "pieces": pieces}
    enough = price * pieces <= year["limit"] if by_price else year["spent"] + price <= year["limit"]
    answer = {"paid": year["year"]} if enough else {"error": "over the limit"}
    return [CallRecord("get_year", {"year": year["year"]}, year), CallRecord("claim", arguments, answer)]


@pytest.mark.parametrize("by_price", [False, True])
def test_a_sum_or_product_is_compared_with_a_limit_and_never_guessed(by_price: bool) -> None:
    traces = [_claiming(number, by_price=by_price) for number in range(900)]
    source, outcomes = _module(find_rules(traces[:300], ["claim"])), Counter[str | None]()
    for look, (_, arguments, answer) in traces[300:]:
        state = State({("get_year", key_of(look.arguments)): json.dumps(look.answer)})
        written = answer_of(source, state, "claim", arguments)
        outcomes["unknown" if written is None else "right" if parsed(written, {}) == answer else "wrong"] += 1
    assert outcomes["right"] > 570 and outcomes["wrong"] <= 6, outcomes
    state = State({("get_year", key_of(look.arguments)): json.dumps({**look.answer, "spent": None, "limit": "much"})})
    assert answer_of(source, state, "claim", arguments) is None


def test_a_number_is_not_taken_for_a_truth_value() -> None:
    assert generalize([1, 1], [Scope({"a": 1}, {}), Scope({"a": True}, {})]) == Const("1"), "and not the argument"
    stocks: list[dict[str, Any]] = [{"A": 0, "B": 3}, {"A": 5, "B": 0}]
    scopes = [Scope({"item": item}, {"shop": {"stock": stock}}) for item, stock in zip("AB", stocks, strict=True)]
    emptied = [{"stock": {**stock, item: False}} for item, stock in zip("AB", stocks, strict=True)]
    changed = generalize(emptied, scopes)
    assert changed is not None
    assert [json.dumps(evaluate(changed, scope)) for scope in scopes] == list(map(json.dumps, emptied))


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_answers_are_written_in_the_recorded_json_format(style: Mapping[str, Any]) -> None:
    answers = [json.dumps({"name": "Zo\u00eb", "number": number}, **style) for number in range(3)]
    calls = [("show", {"id": number}, answer) for number, answer in enumerate([*answers, "out of order", "closed", "closed"])]
    assert Recordings([Trace("t", calls)], frozenset(), {}).styles == {"show": style}


def test_what_is_no_number_is_not_computed_with() -> None:
    scope = Scope({"one": True, "two": "2", "three": 3}, {})
    assert scope.numbers == [(Ref("args", ("three",)), 3)]
    large = Scope({"a": 10**400, "b": 1.5, "c": float("nan"), "d": float("inf")}, {})
    assert large.numbers == [(Ref("args", ("b",)), 1.5)]
    assert generalize([f"it is {10**400}", "9" * 5000], [large, large], arithmetic=True) is None
    for wrong in ("2", True, None, [1]):
        with pytest.raises(Unknown, match="no number"):
            rounded(wrong)
        with pytest.raises(Unknown, match="no number"):
            fixed(wrong, 2)
    assert rounded(0.1 + 0.2) == 0.3 and rounded(2**60 + 1) == 2**60 + 1
    assert (fixed(12.5, 2), fixed(-3, 1), fixed(0.1 + 0.2, 2)) == ("12.50", "-3.0", "0.30")


def test_a_value_is_put_where_one_was_and_nowhere_else() -> None:
    stock = {"room": {"pens": 3, "ink": 0}}
    assert put(stock, [(["room", "ink"], 5)]) == {"room": {"pens": 3, "ink": 5}} and stock["room"]["ink"] == 0
    for path in (["room", "paper"], ["hall", "ink"], []):
        with pytest.raises(LookupError):
            put(stock, [(path, 1)])


def _spending(number: int) -> list[CallRecord]:
    """A claim is paid as far as the employee's grade allows in its category. All three records are looked up."""
    rng = Random(number)
    kinds, grades = ["meals", "travel", "training"], ["junior", "senior"]
    kind, grade, amount = rng.choice(kinds), rng.choice(grades), rng.choice([12.5, 40.0, 99.99, 250.3])
    claim = {"claim": f"C{number + 100}", "who": f"E{number + 100}", "kind": kind, "amount": amount}
    file = {"who": claim["who"], "grade": grade, "spent": {each: rng.randint(0, 900) / 2 for each in kinds}}
    limit = {"grade": grade, "kind": kind, "limit": (200.0 + 100 * kinds.index(kind)) * (1 + grades.index(grade))}
    looks = [
        CallRecord("get_claim", {"claim": claim["claim"]}, claim),
        CallRecord("get_file", {"who": claim["who"]}, file),
        CallRecord("get_limit", {"grade": grade, "kind": kind}, limit),
    ]
    left = round(limit["limit"] - file["spent"][kind], 2)
    if amount > left:
        answer = f"Only {left:.2f} EUR of {limit['limit']:.2f} are left for {kind} of {claim['who']}, claim {claim['claim']}."
        return [*looks, CallRecord("approve", {"claim": claim["claim"]}, answer), looks[0], looks[1]]
    spent = {**file["spent"], kind: round(file["spent"][kind] + amount, 2)}
    approve = CallRecord("approve", {"claim": claim["claim"]}, f"{claim['claim']}: {amount:.2f} EUR are paid.")
    return [*looks, approve, looks[0], CallRecord("get_file", {"who": claim["who"]}, {**file, "spent": spent})]


def test_a_rule_joins_three_documents_and_looks_values_up_by_those_of_another() -> None:
    traces = [_spending(number) for number in range(200)]
    source, exact = _module(find_rules(traces[:80], ["approve"])), 0
    for *looks, (_, arguments, answer), _, (_, who, file) in traces[80:]:
        state = State({(tool, key_of(own)): json.dumps(document) for tool, own, document in looks})
        if (written := answer_of(source, state, "approve", arguments)) is not None:
            assert (written, state.read("get_file", **who)) == (answer, file)
            exact += 1
    assert exact > 110


def test_what_nobody_looked_at_again_is_not_known_to_be_unchanged() -> None:
    traces = [_spending(number)[:4] for number in range(60)]
    source, state = _module(find_rules(traces, ["approve"])), State()
    for tool, own, document in traces[0][:3]:
        state.learn(tool, document, **own)
    assert answer_of(source, state, "approve", traces[0][3].arguments) == traces[0][3].answer
    for tool, own, _ in traces[0][:3]:
        with pytest.raises(Unknown):
            state.read(tool, **own)


def test_a_record_may_be_an_error_or_hold_anything_where_others_hold_a_key() -> None:
    traces = [_spending(number) for number in range(80)]
    for number, odd in enumerate(["Error: no such claim", [1], None, 3, {"kind": ["meals"]}, {"kind": True}, {}]):
        claim = traces[number * 9][0]
        traces[number * 9][0] = claim._replace(answer={**claim.answer, **odd} if isinstance(odd, dict) else odd)
        traces[number * 9][4] = traces[number * 9][0]
    rule = find_rules(traces, ["approve"])["approve"]
    assert rule is not None and len(rule.bindings) == 3


def test_two_records_of_one_kind_have_two_names() -> None:
    def sell(number: int) -> list[CallRecord]:
        users = {side: {"user": f"{side[0].upper()}{number + 100}", "state": "open"} for side in ("buyer", "seller")}
        arguments = {side: {"user": wallet["user"]} for side, wallet in users.items()}
        looks = [CallRecord("get_wallet", {"user": each["user"]}, each) for each in users.values()]
        paid = CallRecord("get_wallet", {"user": users["buyer"]["user"]}, {**users["buyer"], "state": "paid"})
        return [*looks, CallRecord("sell", arguments, "sold"), paid, looks[1]]

    traces, state = [sell(number) for number in range(40)], State()
    for tool, own, document in traces[0][:2]:
        state.learn(tool, document, **own)
    source = _module(rules := find_rules(traces, ["sell"]))
    assert answer_of(source, state, "sell", traces[0][2].arguments) == "sold"
    for side, wallet in (("B100", "paid"), ("S100", "open")):
        assert state.read("get_wallet", user=side)["state"] == wallet
    oneself: Any = {"buyer": {"user": "S100"}, "seller": {"user": "S100"}}
    assert answer_of(source, state, "sell", oneself) is None, "nobody sold to oneself"
    assert (rule := rules["sell"]) is not None
    wallets = {binding.name: {"user": "S100", "state": "open"} for binding in rule.bindings}
    with pytest.raises(LookupError, match="the same one"):
        rule.answer(Scope(oneself, {**wallets, MENTIONED: {"buyer.user": True, "seller.user": True}}))


def test_a_document_may_be_the_id_of_another() -> None:
    def noting(number: int) -> list[CallRecord]:
        user, mail = f"U{number + 100}", f"m{number}@x.org"
        find, look = CallRecord("find", {"mail": mail}, user), CallRecord("get", {"user": user}, {"name": f"Ann{number}"})
        return [find, look, CallRecord("note", {"mail": mail}, f"Noted for Ann{number}.")]

    (find, look, note), traces = noting(50), [noting(number) for number in range(30)]
    state = State({(tool, key_of(own)): json.dumps(document) for tool, own, document in (find, look)})
    assert answer_of(_module(find_rules(traces, ["note"])), state, "note", note.arguments) == "Noted for Ann50."


def test_a_text_holds_numbers_that_are_there_rather_than_computed_ones() -> None:
    documents = [{"a": a, "b": a + 100, "p": p, "q": p + 50} for a, p in ((1.5, 2.5), (3.5, 7.75), (8.5, 9.0))]
    texts = [f"left {each['b']:.2f} of {each['q']:.2f}." for each in documents]
    found = generalize(texts, [Scope({}, {"card": each}) for each in documents], arithmetic=True)
    assert found == Text(("left ", Fixed(Ref("card", ("b",)), 2), " of ", Fixed(Ref("card", ("q",)), 2), "."))


def test_a_field_is_tested_by_its_name_where_an_argument_says_that_name() -> None:
    def approve(number: int) -> list[CallRecord]:
        record = {"claim": f"C{number}", "amount": Random(number).choice([1, 2, 3, 50, 60, 70])}
        arguments, answer = {"claim": f"C{number}", "note": f"n{number}"}, "ok" if record["amount"] <= 3 else "too much"
        return [CallRecord("get", {"claim": f"C{number}"}, record), CallRecord("approve", arguments, answer)]

    rules, arguments = (
        find_rules([approve(number) for number in range(100, 140)], ["approve"]),
        {"claim": "C7", "note": "amount"},
    )
    (state := State()).learn("get", record := {"claim": "C7", "amount": 2}, claim="C7")
    assert answer_of(_module(rules), state, "approve", arguments) == "ok"
    rule = rules["approve"]
    assert rule is not None
    documents = {"mentioned": {"claim": True}, rule.bindings[0].name: record}
    assert rule.answer(Scope(arguments, documents)) == "ok"


def test_an_answer_may_say_whether_its_entity_was_looked_up() -> None:
    def approve(number: int) -> list[CallRecord]:
        claim, known = {"claim": f"C{number}"}, number % 3 > 0
        return [CallRecord("get", claim, claim)] * known + [CallRecord("approve", claim, {**claim, "ok": known})]

    source = _module(find_rules([approve(number) for number in range(100, 160)], ["approve"]))
    assert answer_of(source, State(), "approve", {"claim": "C7"}) in (None, '{"claim": "C7", "ok": false}')


# --- entities that tie all traces together -----------------------------------------------------------------------------


def _giving_back(number: int) -> Trajectory:
    """Items of an order go back. Each trace looks at the next one's order, too, so that all are tied."""
    rng = Random(number)

    def order(name: int) -> dict[str, Any]:
        items = [{"item": f"I{name}{place}", "price": rng.randint(5, 99)} for place in range(3)]
        return {"order": f"K{name}", "items": items, "kind": "parcel"}

    mine = order(number)
    items = rng.sample([each["item"] for each in mine["items"]], 2)
    if rng.random() < 0.4:
        items[1] = "I77"
    known = all(item.startswith(f"I{number}") for item in items)
    answer = json.dumps({"back": sorted(items), "state": "NY"}) if known else "Error: some item not found"
    arguments = {"order": mine["order"], "items": items, "kind": "parcel", "state": "NY"}
    calls = [
        ("get_order", {"order": mine["order"]}, json.dumps(mine)),
        ("get_order", {"order": f"K{number + 1}"}, json.dumps(order(number + 1))),
        ("give_back", arguments, answer),
        ("get_kinds", {"shop": f"S{number}"}, json.dumps({"shop": f"S{number}", "kinds": ["parcel"]})),
    ]
    steps = [Step(observation="", action=render_call(tool, own), next_observation=text) for tool, own, text in calls]
    task = Task(id=f"back/{number}", instruction="Items go back.", environment="back", tools=["get_order", "give_back"])
    return Trajectory(task=task, steps=steps, success=True)


@pytest.fixture(scope="module")
def tied() -> ReplayBuffer:
    replay_buffer = ReplayBuffer(":memory:")
    replay_buffer.extend(_giving_back(100 + number) for number in range(80))
    return replay_buffer


def test_what_is_left_out_shares_no_entity_even_where_all_traces_are_tied(tied: ReplayBuffer) -> None:
    recordings = Recordings.of(tied, tools=(), writes=["give_back"], environment=None)
    folds = list(recordings.folds())
    assert sum(len(held_out) for _, held_out in folds) == 80
    for rest, held_out in folds:
        looked_up = [{str(call[1]) for trace in traces for call in trace.calls[:2]} for traces in (rest.traces, held_out)]
        assert len(rest.traces) > 40 and not looked_up[0] & looked_up[1]


def test_a_value_of_many_documents_ties_no_document_to_a_change(tied: ReplayBuffer) -> None:
    recordings = Recordings.of(tied, tools=(), writes=["give_back"], environment=None)
    first = recordings.first_documents(recordings.traces[0])
    assert [tool for tool, _ in first] == ["get_order", "get_order", "get_kinds"], "a parcel is named everywhere"


def test_lists_are_compared_and_nothing_is_known_of_words_that_no_call_had(tied: ReplayBuffer, tmp_path: Path) -> None:
    """An argument may have the name `state`, too."""
    report = compile_world(tied, tmp_path / "world", writes=["give_back"], on_progress=lambda *_: None)
    (give_back,) = (each for each in report if each.writes)
    assert give_back.admitted and give_back.exact > 70 and not give_back.wrong
    text = (tmp_path / "world" / "world.py").read_text()
    assert "sorted(args['items'])" in text and "named(at(get_order_order), at(args, 'items'))" in text
    order = {"order": "K7", "items": [{"item": "I70", "price": 3}, {"item": "I71", "price": 3}], "kind": "parcel"}
    arguments = {"order": "K7", "items": ["I71", "I70"], "kind": "parcel", "state": "NY"}
    module = Module(tmp_path / "world")
    for document, changed, answer in [
        (order, {}, '{"back": ["I70", "I71"], "state": "NY"}'),
        (order, {"items": ["I70", "I70"]}, "Error: some item not found"),
        (order, {"kind": "letter"}, None),
        ({**order, "kind": "letter"}, {}, None),
        ({**order, "status": "gone"}, {}, None),
    ]:
        steps = [("get_order", {"order": "K7"}, json.dumps(document))]
        assert module.respond("new", steps, ("give_back", {**arguments, **changed})) == answer, changed


@pytest.mark.parametrize("folds", [3, 10])
def test_folds_that_are_left_out_would_change_nothing(folds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_full(each: list[tuple[Counter[bool | None], bool]]) -> tuple[int, bool]:
        unmixed, total = (sum((one for one, own in each if own or not only), Counter[bool | None]()) for only in (True, False))
        for counts in (unmixed, total):
            answered = counts[True] + counts[False]
            if counts[True] >= 0.99 * answered and 2 * answered >= total.total():
                return counts[True], True
        return total[True], False

    random, short = Random(folds), 0
    for _ in range(3000):
        weights = random.choice([(98, 1, 1), (90, 1, 9), (40, 1, 59), (50, 30, 20)])
        outcomes = [
            (Counter(random.choices([True, False, None], weights, k=random.randint(1, 30))), random.random() < 0.7)
            for _ in range(folds)
        ]
        played = list[int]()

        def left_out(*given: Any, outcomes: Any = outcomes, played: list[int] = played) -> Any:
            played.append(given[3])
            return outcomes[given[3]]

        monkeypatch.setattr(enumerate_rules, "_left_out", left_out)
        usable: Any = [None] * sum(counts.total() for counts, _ in outcomes)
        exact, accepted = enumerate_rules._cross_validate(usable, lambda _: None, folds)  # type: ignore[arg-type,return-value]
        expected = in_full(outcomes)
        if len(played) == folds:
            assert (exact, accepted) == expected
        else:  # neither accepted nor promising
            short += 1
            assert not accepted and not expected[1] and max(exact, expected[0]) < 0.9 * len(usable)
    assert 100 < short < 2900
