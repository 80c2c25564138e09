"""Edited successes against a support desk that can say of each whether it would really have been paid."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from dreamgym_lg.actions import ToolCall, is_answer, parse_action, render_answer, render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.fidelity.edits import edited_successes
from dreamgym_lg.types import Step, Task, Trajectory

WRITES = frozenset({"refund", "set_address", "escalate", "add_note", "close"})
STATUSES = ("delivered", "shipped", "processing")


class Desk:
    """The real thing: orders, tools over them, and what a customer really wants done."""

    def __init__(self, number: int) -> None:
        rng = random.Random(number)
        self.order = f"A-{1000 + number}"
        self.kind = ("status", "refund", "address", "broken")[number % 4]
        self.total, self.status, self.city = 10 + number, STATUSES[number % 3], f"{number} Main Street"
        self.wants = {
            "status": f"Where is my order {self.order}?",
            "refund": f"I want my money back for {self.order}.",
            "address": f"Please send {self.order} to {self.city}.",
            "broken": f"Order {self.order} arrived broken!",
        }[self.kind]
        self.rng = rng

    def expected(self) -> set[tuple[str, ...]]:
        if self.kind == "refund":
            delivered = self.status == "delivered"
            return {("refund", self.order, str(self.total))} if delivered else {("escalate", self.order)}
        if self.kind == "address":
            return {("set_address", self.order, self.city)}
        return {("escalate", self.order)} if self.kind == "broken" else set()

    def answered(self, call: ToolCall) -> str:
        arguments = call.arguments
        if call.name == "lookup_order":
            return json.dumps({"order_id": arguments["order_id"], "status": self.status, "total": self.total})
        if call.name == "refund" and arguments["amount"] != self.total:
            return json.dumps({"error": f"{arguments['amount']} is not the order's total"})
        return json.dumps({"done": call.name, **arguments})

    def pays(self, episode: Trajectory) -> bool:
        """Plays the calls on the database; notes and the wording of a reason do not matter."""
        calls = [parse_action(step.action) for step in episode.steps[:-1]]
        done = {
            (call.name, *(str(value) for field, value in sorted(call.arguments.items(), reverse=True) if field != "reason"))
            for call in calls
            if isinstance(call, ToolCall) and call.name in WRITES - {"add_note", "close"}
        }
        answer = str(parse_action(episode.steps[-1].action))
        return done == {tuple([n, *r]) for n, *r in self.expected()} and (
            self.kind != "status" or f"{self.status} and costs {self.total}." in answer
        )


def success(number: int, *, note: bool = False, retry: bool = False) -> Trajectory:
    desk = Desk(number)
    calls = [ToolCall("lookup_order", {"order_id": desk.order})]
    for name, _, *rest in desk.expected():
        if retry and name == "refund":
            calls.append(ToolCall("refund", {"order_id": desk.order, "amount": 5}))
        more = {"refund": {"amount": desk.total}, "set_address": {"new_address": rest[0] if rest else ""}}
        calls.append(ToolCall(name, {"order_id": desk.order, **more.get(name, {"reason": f"asked: {desk.wants}"})}))
    if note:
        calls.append(ToolCall("add_note", {"order_id": desk.order, "text": "handled"}))
    said = {
        "status": f"Your order is {desk.status} and costs {desk.total}.",
        "refund": "Your money is on its way." if desk.status == "delivered" else "A colleague takes over.",
        "address": f"It goes to {desk.city} now.",
        "broken": "I am sorry. A colleague takes over.",
    }
    steps = [(render_call(*call), desk.answered(call)) for call in calls] + [(render_answer(said[desk.kind]), "")]
    return recorded(number, desk.wants, steps)


def recorded(number: int, request: str, steps: Sequence[tuple[str, str]], **fields: Any) -> Trajectory:
    task = Task(id=f"desk/{number}", instruction=request, environment="desk", observation=request)
    seen, made = request, []
    for place, (action, answer) in enumerate(steps, start=1):
        last = place == len(steps)
        made.append(
            Step(observation=seen, action=action, next_observation=answer, reward=float(last), terminated=last, reasoning="why")
        )
        seen = answer
    return Trajectory(task=task, steps=made, success=True, run="traces", rollout_index=number, **fields)


RECORDED = [success(number) for number in range(48)]


def number_of(episode: Trajectory) -> int:
    return int(episode.task.id.removeprefix("desk/"))


def test_no_edit_would_really_be_paid_and_every_kind_is_there() -> None:
    assert all(Desk(number_of(episode)).pays(episode) for episode in RECORDED)  # the desk pays what is right
    edits = edited_successes(RECORDED, writes=WRITES)
    paid = [(edit.run, [step.action for step in edit.steps]) for edit in edits if Desk(number_of(edit)).pays(edit)]
    assert paid == []
    kinds = Counter(edit.run for edit in edits)
    assert set(kinds) == {f"edited/{kind}" for kind in ("left_out", "other_episode", "no_call", "other_message")}
    assert min(kinds.values()) >= 12 and {edit.task.id for edit in edits} == {each.task.id for each in RECORDED}


def test_an_edit_is_a_whole_episode_that_earned_nothing() -> None:
    for edit in edited_successes(RECORDED, writes=WRITES):
        assert (edit.success, edit.reward, edit.error, edit.source) == (False, 0.0, None, "synthetic")
        assert edit.task == RECORDED[number_of(edit)].task
        assert [step.terminated for step in edit.steps] == [False] * (len(edit.steps) - 1) + [True]
        assert [is_answer(step.action) for step in edit.steps] == [step.terminated for step in edit.steps]
        assert edit.steps[0].observation == edit.task.observation and edit.steps[-1].reasoning == ""
        for before, after in zip(edit.steps, edit.steps[1:], strict=False):
            assert after.observation == before.next_observation


def test_the_same_seed_gives_the_same_edits_and_keys_are_unique() -> None:
    first = edited_successes(RECORDED, writes=WRITES, seed=3)
    assert first == edited_successes(RECORDED, writes=WRITES, seed=3) != edited_successes(RECORDED, writes=WRITES, seed=4)
    assert len({(edit.run, edit.task.id, edit.rollout_index) for edit in first}) == len(first)
    of_each = Counter(edit.task.id for edit in first)
    assert max(of_each.values()) <= 3


def test_a_call_that_another_success_of_the_request_lacks_is_not_left_out() -> None:
    noted = [success(number, note=True) for number in range(8)]
    needed = edited_successes(noted, writes=WRITES)
    assert any(not _calls(edit, "add_note") for edit in needed if edit.run == "edited/left_out")  # nothing says otherwise
    both = [*noted, success(1)]
    edits = [edit for edit in edited_successes(both, writes=WRITES) if edit.task.id == "desk/1"]
    left = [edit for edit in edits if edit.run == "edited/left_out"]
    assert left and all(not _calls(edit, "escalate") and not _calls(edit, "refund") for edit in left)
    assert not any(Desk(number_of(edit)).pays(edit) for edit in edits)


def test_a_refused_first_try_is_not_left_out_alone() -> None:
    tried = [success(number, retry=True) for number in range(48)]
    edits = edited_successes(tried, writes=WRITES)
    assert edits and not any(Desk(number_of(edit)).pays(edit) for edit in edits)


def test_episodes_of_another_form_give_no_edits_and_failures_are_refused() -> None:
    game = recorded(1, "Take the key.", [("take key", "Taken.")])
    chat = recorded(2, "Hello", [(render_answer("Hello!"), "")])
    turns = recorded(3, "Hello", [(render_answer("Which order?"), "A-1"), (render_answer("Done."), "")])
    assert edited_successes([game, chat, turns], writes=WRITES) == []
    failed = Trajectory(task=game.task, steps=game.steps, success=False)
    with pytest.raises(ConfigurationError, match="'desk/1' is no success"):
        edited_successes([failed], writes=WRITES)


def _calls(episode: Trajectory, name: str) -> int:
    return sum(isinstance(call := parse_action(step.action), ToolCall) and call.name == name for step in episode.steps)
