"""Recorded answers: byte for byte, behind the same writing calls, and none where records disagree or must not answer."""

import json
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from langchain_core.tools import tool
from orders import CANCEL, DONE, NOTE, ORDER, PAID, REFUND, REFUNDED, Index, Says, order_task, play, plays_and_judges, trace
from pydantic import BaseModel, SecretStr

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.dream import Answer, Dream, Episode, Model, ModelJudge, Recorded, References
from dreamgym_lg.dream.trace_index import MISSES, TraceIndex
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory


class Desk:
    """A dream of recorded answers and a language model that answers the rest with a number of its own."""

    def __init__(self, scripted: Any, buffer: ReplayBuffer) -> None:
        self.chat = plays_and_judges(scripted)
        self.index = Index(buffer)
        self.dream = Dream([Recorded(self.index), Model(self.chat)], judges=[ModelJudge(self.chat)])

    def play(self, of: Task, *actions: str) -> list[Any]:
        return play(self.dream.create_environment(), of, *actions)

    def decided(self, of: Task, *actions: str) -> list[tuple[str, str]]:
        """Observation of each step, and which part decided it."""
        return [(result.observation, result.info["decided_by"]) for result in self.play(of, *actions)]


@pytest.fixture
def desk(scripted: Any, buffer: ReplayBuffer) -> Desk:
    return Desk(scripted, buffer)


# --- the same call ----------------------------------------------------------------------------------------------------


def test_a_recorded_call_is_answered_byte_for_byte_and_the_model_fills_only_the_rest(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (ORDER, PAID), (REFUND, "ok"), (ORDER, REFUNDED), DONE))
    other = order_task("t2")
    recorded = [(PAID, "recorded"), ("ok", "recorded"), (REFUNDED, "recorded")]
    assert desk.decided(other, ORDER, REFUND, ORDER) == recorded and not desk.chat.asked
    assert desk.decided(other, CANCEL, ORDER) == [("dreamed 1", "model"), ("dreamed 2", "model")], "after another write"
    spaced = '{"name": "get_order", "arguments": {"order_id":"W-204"}}'
    assert desk.decided(other, spaced) == [(PAID, "recorded")], "one call in another spelling"
    assert desk.decided(replace(other, environment="another"), ORDER)[0][1] == "model"


def test_a_look_up_of_what_nobody_named_is_answered_as_most_such_look_ups_were(buffer: ReplayBuffer, desk: Desk) -> None:
    def look_up(order: str) -> str:
        return render_call("get_order", {"order_id": order})

    for number in range(MISSES):
        task = replace(order_task(f"t{number}"), instruction=f"Where is A{number}?")
        error = f'{{"error": "no order B{number}"}}'
        buffer.add(trace(task, (look_up(f"B{number}"), error, False), (look_up(f"A{number}"), PAID), DONE))
        other = replace(order_task("other"), instruction="Where is C7?")
        if number < MISSES - 1:
            assert desk.decided(other, look_up("D8"))[0][1] == "model", number
    (missed,) = desk.play(other, look_up("D8"))
    assert (missed.observation, missed.info["valid"]) == ('{"error": "no order D8"}', False)
    assert desk.decided(other, look_up("C7"))[0][1] == "model", "the request names it: it exists"
    for number in range(MISSES):
        assert desk.decided(other, look_up("D9"))[0][1] == "recorded", number
        task = replace(order_task(f"n{number}"), instruction="My order?")
        buffer.add(trace(task, (look_up(f"E{number}"), PAID.replace("W-204", f"E{number}")), DONE))
    assert desk.decided(other, look_up("D9"))[0][1] == "model", "half of them found something"


def test_a_popular_look_up_answers_no_other_one(buffer: ReplayBuffer, desk: Desk) -> None:
    popular, other = (render_call("get_policy", {"topic": topic}) for topic in ("refunds", "warranty"))
    for number in range(MISSES + 1):
        buffer.add(trace(order_task(f"t{number}"), (popular, "refunds: within 30 days"), DONE))
    assert desk.decided(order_task("other"), other)[0][1] == "model"


def test_what_is_measured_does_not_vote_on_unknown_things(buffer: ReplayBuffer) -> None:
    for number in range(MISSES):
        look_up = render_call("get_order", {"order_id": f"B{number}"})
        buffer.add(trace(order_task(f"t{number}"), (look_up, "no such order", False), DONE))
    episode = Episode(task=order_task("t0"), action=render_call("get_order", {"order_id": "D8"}))
    recorded = Recorded(Index(buffer))
    assert recorded.respond(episode).observation == "no such order"  # type: ignore[union-attr]
    assert recorded.respond(replace(episode, own_traces=False)) is None


@tool
def transfer(amount: Decimal, tags: set[str], pin: SecretStr) -> str:
    """Transfer money."""
    raise AssertionError("no real tool runs")


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        ({"amount": 20, "tags": ["zz", "a", "b", "yy"], "pin": "4711"}, True),
        ({"amount": "20.00", "tags": ["a", "b", "yy", "zz"], "pin": "4711"}, True),
        ({"amount": 20.5, "tags": ["a", "b", "yy", "zz"], "pin": "4711"}, False),
        ({"amount": 20, "tags": ["a", "b", "yy", "zz"], "pin": "0000"}, False),
    ],
)
def test_decimals_sets_and_secrets_are_compared_by_value(buffer: ReplayBuffer, arguments: Any, same: bool) -> None:
    recorded = render_call("transfer", {"amount": 20.0, "tags": ["a", "b", "yy", "zz"], "pin": "4711"})
    buffer.add(trace(order_task(), (recorded, "sent"), DONE))
    index = TraceIndex(buffer, tools=[transfer], writes=["transfer"])
    index.refresh()
    assert (index.call(render_call("transfer", arguments)) == index.call(recorded)) == same


def test_a_thing_that_traces_know_is_no_unknown_one_after_a_write(buffer: ReplayBuffer, desk: Desk) -> None:
    def look_up(number: str) -> str:
        return render_call("get_order", {"order_id": number})

    for number in range(MISSES):
        task = replace(order_task(f"t{number}"), instruction=f"Where is A{number}?")
        buffer.add(trace(task, (look_up(f"B{number}"), "no such order", False), (look_up(f"A{number}"), PAID), DONE))
    other = order_task("other", "Refund the order, please.")
    assert desk.decided(other, REFUND, look_up("D8"))[1][1] == "recorded"
    assert desk.decided(other, REFUND, look_up("A1"))[1][1] == "model", "its state is not known, but it exists"
    customer = order_task("c", messages=[{"role": "system", "content": "You serve D8."}, {"role": "user", "content": "Hello"}])
    assert desk.decided(customer, look_up("D8"))[0][1] == "model", "the system message names it"


def test_an_answer_after_a_text_is_that_of_this_text(buffer: ReplayBuffer) -> None:
    """Code, SQL or a patch is no wording: the tests' answer depends on it."""
    of, run_tests = order_task("code", "Mend add.", tools=[]), render_call("get_order", {"order_id": "tests"})
    bad, good, other = (render_call("write_file", {"text": f"def add(a, b): return {each}"}) for each in ("a-b", "a+b", "0"))
    finished = render_answer("All tests pass.")
    buffer.add(trace(of, (bad, "written"), (run_tests, "1 failed"), finished, success=False))
    for index in (1, 2):
        buffer.add(trace(of, (good, "written"), (run_tests, "1 passed"), finished, index=index))
    index = Index(buffer)
    recorded, references = Recorded(index), References(index)

    def played(write: str) -> tuple[str | None, float]:
        step = Step(observation="", action=write, next_observation="written")
        answer = recorded.respond(Episode(task=of, steps=[step], action=run_tests))
        verdict = references.judge(Episode(task=of, steps=[step], action=finished), None)
        return answer.observation if answer else None, verdict.reward if verdict else -1

    assert played(bad) == ("1 failed", 0), "a recorded failure is none of the successes"
    assert played(good) == ("1 passed", 1)
    assert played(other) == (None, 1), "the answer depends on the text; no judge read it"


def test_an_error_is_answered_as_the_error_that_it_was(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (REFUND, "Error: try later", False), (ORDER, PAID), DONE))
    failed, after = desk.play(order_task("t2"), REFUND, ORDER)
    assert (failed.observation, failed.info["valid"]) == ("Error: try later", False)
    assert after.observation == PAID, "a refused call has written nothing"


def test_the_experience_model_reads_recorded_answers_as_its_own(buffer: ReplayBuffer, desk: Desk) -> None:
    """So the prompt behind them is one that it was trained on."""
    buffer.add(trace(order_task(), (ORDER, PAID), DONE))
    desk.play(order_task("t2"), ORDER, REFUND)
    (prompt,) = desk.chat.asked
    assert prompt[2].text == f"valid, no progress yet\nreward 0, continues\n{PAID}"


def test_an_annotation_goes_with_its_answer_and_splits_no_vote(buffer: ReplayBuffer, desk: Desk) -> None:
    for n, reasoning in enumerate(["It is paid.", "The money is there.", "No."]):
        episode = trace(order_task(f"t{n}"), (ORDER, "other" if n == 2 else PAID), DONE)
        buffer.add(replace(episode, steps=[replace(episode.steps[0], reasoning=reasoning), episode.steps[1]]))
    (result,) = desk.play(order_task("new"), ORDER)
    assert (result.observation, result.info["reasoning"]) == (PAID, "It is paid.")


def test_a_call_is_repeated_within_an_episode_until_something_is_written(desk: Desk) -> None:
    first, again, written, after, again_after = desk.play(order_task(), ORDER, ORDER, REFUND, ORDER, ORDER)
    assert first.observation == again.observation == "dreamed 1" and again.info["decided_by"] == "recorded"
    assert after.observation == again_after.observation != first.observation
    assert len(desk.chat.asked) == 3
    twice = [observation for observation, _ in desk.decided(order_task("t2"), REFUND, REFUND)]
    assert twice[0] != twice[1], "the second refund is another act"


def test_a_refused_write_changes_no_lookup(buffer: ReplayBuffer) -> None:
    refuses = Says(Answer("Error", valid=False))
    refuses.respond = lambda episode: Answer("Error", valid=False) if "cancel" in episode.action else Answer("x")  # type: ignore[method-assign]
    dream = Dream([Recorded(Index(buffer)), refuses])
    *_, last = play(dream.create_environment(), order_task(), ORDER, CANCEL, ORDER)
    assert last.info["decided_by"] == "recorded"


def test_text_agents_and_messages_are_answered_by_others(buffer: ReplayBuffer) -> None:
    buffer.add(trace(order_task(), (ORDER, PAID), DONE))
    house = Task(id="h", instruction="leave", environment="desk")
    buffer.add(Trajectory(task=house, steps=[Step(observation="A door.", action="go", next_observation="Out.")]))
    recorded = Recorded(buffer)
    for action in ("go", DONE, '{"name": "get_order", "arguments": "{"}', "", "[1]"):
        assert recorded.respond(Episode(task=order_task("t2"), action=action)) is None


# --- which traces -----------------------------------------------------------------------------------------------------


def test_traces_that_contradict_each_other_answer_by_their_majority_or_not_at_all(buffer: ReplayBuffer, desk: Desk) -> None:
    tasks, new, decided = [order_task(f"t{n}") for n in range(4)], order_task("new"), []
    for each, answer in zip(tasks, ["a", "b", "b", "a"], strict=True):
        buffer.add(trace(each, (ORDER, answer), DONE))
        decided.append(desk.decided(new, ORDER)[0])
    assert [by for _, by in decided] == ["recorded", "model", "recorded", "model"]
    assert [observation for observation, _ in decided[::2]] == ["a", "b"]
    assert [desk.decided(each, ORDER)[0][0] for each in tasks] == ["a", "b", "b", "a"], "a task's own traces come first"


def test_a_failed_and_a_valid_answer_of_the_same_words_are_two(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task("t1"), (ORDER, "gone", False), DONE))
    buffer.add(trace(order_task("t2"), (ORDER, "gone"), DONE))
    assert desk.decided(order_task("new"), ORDER)[0][1] == "model"


@pytest.mark.parametrize("split", ["validation", "test"])
def test_what_a_trace_of_an_evaluation_task_holds_answers_nothing(buffer: ReplayBuffer, desk: Desk, split: Any) -> None:
    held_out = order_task("held out", split=split)
    buffer.add(trace(held_out, (ORDER, PAID), DONE))
    for each in (order_task("t2"), held_out, order_task("t3", split=split)):
        assert desk.decided(each, ORDER)[0][1] == "model"


def test_a_task_that_is_held_out_answers_nothing_from_then_on(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (ORDER, PAID), DONE))
    assert desk.decided(order_task("t2"), ORDER) == [(PAID, "recorded")]
    buffer.add_tasks([order_task(split="test")])
    assert desk.decided(order_task("t2"), ORDER)[0][1] == "model"


def test_failed_and_dreamed_episodes_are_no_recordings_and_new_real_ones_are(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (ORDER, "dreamed"), DONE, source="synthetic"))
    buffer.add(trace(order_task(), (ORDER, "broken"), DONE, index=1, error="OSError: away"))
    assert desk.decided(order_task("t2"), ORDER)[0][1] == "model"
    buffer.add(trace(order_task(), (ORDER, PAID), DONE, index=2, source="real"))
    assert desk.decided(order_task("t2"), ORDER) == [(PAID, "recorded")]


def test_measured_on_its_traces_a_task_does_not_know_them(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (ORDER, PAID), (REFUND, "ok"), DONE))

    def decided(*steps: Step) -> str:
        return str(desk.dream.resume(order_task(), steps).step(ORDER).info["decided_by"])

    assert decided() == "model"
    assert desk.decided(order_task(), ORDER)[0][1] == "recorded"
    buffer.add(trace(order_task("t2"), (ORDER, PAID), DONE))
    assert decided() == "recorded", "what another task's trace says still counts"
    buffer.add(trace(order_task(), (ORDER, "other"), DONE, index=1))
    buffer.add(trace(order_task(), (ORDER, "other"), DONE, index=2))
    assert decided() == "recorded", "and this task's have no vote"
    assert desk.decided(order_task("t3"), ORDER)[0][1] == "model", "two to two"


def test_recorded_answers_are_known_behind_recorded_steps_at_once(buffer: ReplayBuffer) -> None:
    """A dream that has played nothing yet, and is resumed in the middle of an episode, has read the traces too."""
    buffer.add(trace(order_task(), (REFUND, "ok"), (ORDER, REFUNDED), DONE))
    behind = Step(observation="Task t2.", action=REFUND, next_observation="ok")
    result = Dream([Recorded(buffer)]).resume(order_task("t2"), [behind]).step(ORDER)
    assert (result.observation, result.info["decided_by"]) == (REFUNDED, "recorded")


# --- the index --------------------------------------------------------------------------------------------------------


def test_a_buffer_is_read_again_only_where_real_trajectories_were_added(buffer: ReplayBuffer, monkeypatch: Any) -> None:
    reads, read = [], buffer.real_trajectories
    monkeypatch.setattr(buffer, "real_trajectories", lambda: reads.append(1) or read())
    index = TraceIndex(buffer)
    for number, source in enumerate(["offline", "synthetic", "synthetic", "real"]):
        buffer.add(trace(order_task(), (ORDER, PAID), DONE, index=number, source=source))
        index.refresh()
        index.refresh()
    assert len(reads) == 2


def test_an_episode_that_plays_while_the_buffer_is_read_again_misses_nothing(buffer: ReplayBuffer, monkeypatch: Any) -> None:
    buffer.add(trace(order_task(), (ORDER, PAID), (REFUND, "ok"), DONE))
    index = TraceIndex(buffer)
    index.refresh()
    add, reading, going = TraceIndex._add, threading.Event(), threading.Event()

    def slowly(self: TraceIndex, record: Any) -> None:
        reading.set()
        assert going.wait(10)
        add(self, record)

    monkeypatch.setattr(TraceIndex, "_add", slowly)
    buffer.add(trace(order_task("t2"), (ORDER, PAID), DONE))
    thread = threading.Thread(target=index.refresh)
    thread.start()
    assert reading.wait(10)
    behind = Step(observation="", action=ORDER, next_observation=PAID)
    answer = Recorded(index).respond(Episode(task=order_task("t3"), steps=[behind], action=REFUND))
    going.set()
    thread.join()
    assert answer is not None and answer.observation == "ok"


def test_recorded_answers_are_those_of_a_search_through_all_traces(buffer: ReplayBuffer) -> None:
    """Random traces and questions against the definition, written down without an index."""
    rng = random.Random(0)
    calls = [render_call(name, {"id": id}) for name in ("get_order", "get_user", "refund", "cancel") for id in (1, 2)]
    written = [trace(order_task(f"t{n % 5}"), *_random_acts(rng, calls), index=n) for n in range(40)]
    buffer.extend(written)
    dream = Dream([Recorded(TraceIndex(buffer, writes=["refund", "cancel"])), Says(Answer("nobody knows"), "nobody")])
    known = 0
    for _ in range(300):
        task, own_traces = order_task(f"t{rng.randrange(8)}"), rng.random() < 0.7
        environment = dream.create_environment() if own_traces else dream.resume(task)
        environment.reset(task)
        history: list[tuple[str, str]] = []
        for call in rng.choices(calls, k=rng.randrange(1, 5)):
            result = environment.step(call)
            traces = written if own_traces else [each for each in written if each.task.id != task.id]
            assert result.observation == (_by_definition(traces, task, history, call) or "nobody knows")
            history.append((call, result.observation))
            known += result.info["decided_by"] == "recorded"
    assert 200 < known < 700, "both cases were seen"


def _random_acts(rng: random.Random, calls: Sequence[str]) -> list[tuple[str, str]]:
    return [(call, f"{json.loads(call)['name']} {rng.choice('aaab')}") for call in rng.choices(calls, k=4)]


def _writes(calls: Sequence[str]) -> list[str]:
    return [call for call in calls if "refund" in call or "cancel" in call]


def _by_definition(traces: Sequence[Trajectory], of: Task, history: Sequence[tuple[str, str]], call: str) -> str | None:
    since = len(history)
    while since and not _writes([history[since - 1][0]]):
        since -= 1
    before = [answer for earlier, answer in history[since:] if earlier == call]
    if before and not _writes([call]):
        return before[-1]
    for those in ([each for each in traces if each.task.id == of.id], traces):
        answers = [
            step.next_observation
            for each in those
            for position, step in enumerate(each.steps)
            if step.action == call
            and _writes([s.action for s in each.steps[:position]]) == _writes([earlier for earlier, _ in history])
        ]
        for answer in set(answers):
            if 2 * answers.count(answer) > len(answers):
                return answer
    return None


# --- calls by what they mean ------------------------------------------------------------------------------------------


def test_an_answer_that_shows_a_traces_own_words_is_not_given_after_others(buffer: ReplayBuffer) -> None:
    """Free text does not count as a difference of writing calls: the policy read what it had not written."""
    recorder = Recorded(TraceIndex(buffer, writes=["add_note"]))
    own, user = render_call("add_note", {"text": "call back on Monday, please"}), render_call("get_user", {"id": 1})
    for n in range(3):
        words = f'"Größe {n}" is too small'
        add = render_call("add_note", {"text": words})
        buffer.add(trace(order_task(f"t{n}"), (add, "ok"), (ORDER, json.dumps([words])), (user, "a gold member"), DONE))
    behind = [Step(observation="", action=own, next_observation="ok")]

    def answer(call: str) -> Answer | None:
        return recorder.respond(Episode(task=order_task("t0"), steps=behind, action=call))

    assert (answer(ORDER), answer(user)) == (None, Answer("a gold member"))


def test_conversations_answer_calls_too(buffer: ReplayBuffer, desk: Desk) -> None:
    buffer.add(trace(order_task(), (render_answer("Which order?"), "W-204"), (ORDER, PAID), (NOTE, "ok"), DONE))
    assert desk.decided(order_task("t2"), ORDER, NOTE) == [(PAID, "recorded"), ("ok", "recorded")]


class Line(BaseModel):
    sku: str
    quantity: int = 1
    gift: bool = False


@tool
def place_order(customer: int, lines: list[Line], note: str = "") -> str:
    """Place an order."""
    return ""


def test_calls_are_compared_as_the_tool_receives_them() -> None:
    """Each was another call, so that the same order was no success."""
    index = TraceIndex(ReplayBuffer(":memory:"), tools=[place_order])

    def call(**arguments: Any) -> Any:
        return index.call(render_call("place_order", arguments))

    first = call(customer=7, lines=[{"sku": "X1", "quantity": 2}])
    assert first == call(customer="7", lines=[{"sku": "X1", "quantity": 2.0}])
    assert first == call(customer=7.0, lines=[{"sku": "X1", "quantity": "2", "gift": False}], note="")
    assert first == call(customer=7, lines=[{"quantity": 2, "sku": "X1"}], why="the tool ignores it")
    for other in ({"customer": 8}, {"lines": [{"sku": "X1", "quantity": 3}]}, {"note": "soon"}, {"lines": "two X1"}):
        assert first != call(**{"customer": 7, "lines": [{"sku": "X1", "quantity": 2}], **other})
