"""Reasoning by rules: where arguments were told, what a final answer needed, and the demonstrations that say so."""

import json
from collections.abc import Sequence

import pytest

from dreamgym_lg import ExperienceModel, ReplayBuffer, Step, Task, Trajectory
from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.experience.rules import Played, answer_reasoning, call_reasoning, calls_made, success_shown, untold
from dreamgym_lg.experience.training_data import to_conversation

REASON = {"type": "string", "enum": ["late", "broken"]}
TOOLS = [
    {"function": {"name": name, "parameters": {"properties": {"order": {"type": "string"}, "reason": REASON}}}}
    for name in ("get_order", "refund", "escalate")
]
WRITES = {"refund", "escalate"}
STATUS = '{"status": "delivered", "customer": "C7"}'


def task_of(order: str, wish: str = "Refund order") -> Task:
    return Task(id=order, instruction=f"{wish} {order}.", environment="desk", tools=TOOLS)


def call(name: str, order: str, answer: str = STATUS, valid: bool = True, **arguments: str) -> Step:
    action = render_call(name, {"order": order, **arguments})
    return Step(observation="", action=action, next_observation=answer, valid=valid)


def episode(order: str, *steps: Step, success: bool, answer: str = "Done.", wish: str = "Refund order") -> Trajectory:
    task, seen, chained = task_of(order, wish), f"{wish} {order}.", []
    for step in [*steps, Step(observation="", action=render_answer(answer), next_observation="", terminated=True)]:
        chained.append(Step(**{**{f: getattr(step, f) for f in Step.__slots__}, "observation": seen}))
        seen = step.next_observation
    return Trajectory(task=task, steps=chained, success=success)


def history(*steps: Step) -> list[Played]:
    return [Played(step.action, step.next_observation, step.valid) for step in steps]


@pytest.mark.parametrize(
    "step, told",
    [
        (call("refund", "W-1"), "refund(order from the task)"),
        (call("refund", "C7"), "refund(order from get_order)"),
        (call("refund", "W-11"), "refund(order from nowhere)"),
        (call("refund", "W-1", reason="broken"), "refund(order from the task, reason=broken)"),
        (call("refund", "W-1", '{"error": "it is open"}'), "refund(order from the task) refused"),
    ],
)
def test_a_call_says_where_its_arguments_were_told(step: Step, told: str) -> None:
    made = calls_made(task_of("W-1"), history(call("get_order", "W-1"), step))
    assert [each.call for each in made] == ["get_order(order from the task)", told]


def test_calls_of_two_orders_count_twice_and_refused_ones_not() -> None:
    task = task_of("W-1 and W-2")
    steps = [call("refund", "W-1"), call("refund", "W-2"), call("refund", "W-2"), call("escalate", "W-1", valid=False)]
    assert [each.call for each in calls_made(task, history(*steps), WRITES)] == ["refund(order from the task)"] * 2


def test_a_call_is_valid_or_not_reads_or_writes_and_may_be_refused() -> None:
    task = task_of("W-1")
    assert call_reasoning(task, [], call("get_order", "W-1"), WRITES) == "valid, it reads, order from the task"
    refused = call("refund", "W-1", '{"error": "it is open"}')
    assert call_reasoning(task, [], refused, WRITES) == "valid, it writes, order from the task, it is refused"
    assert call_reasoning(task, [], call("refund", "W-9", "No!", valid=False), ()) == "invalid, order from nowhere"


def test_a_final_answer_is_told_apart_by_what_the_success_of_a_similar_task_did() -> None:
    like = episode("W-2", call("get_order", "W-2"), call("refund", "W-2", "{}"), success=True)
    shown = [success_shown(like.task, like.steps)]
    assert shown[0].observation == "Refund order W-2."

    def reasoned(*steps: Step, success: bool, claims: Sequence[str] = ()) -> str:
        return answer_reasoning(task_of("W-1"), history(*steps), shown, claims, success=success, writes=WRITES)

    refund = "refund(order from the task)"
    looked_up, refunded = call("get_order", "W-1"), call("refund", "W-1")
    assert reasoned(looked_up, success=False) == f"valid, needed: {refund}, done: nothing, it fails the task"
    right = f"valid, needed: {refund}, done: {refund}, it completes the task"
    assert reasoned(refunded, success=True) == right
    assert "it says the wrong thing, it fails" in reasoned(refunded, success=False)
    assert "w-8 is told by nobody, it fails" in reasoned(refunded, success=False, claims=["w-8"])


def test_what_an_answer_claims_has_to_be_told() -> None:
    answer, known = render_answer("W-1 of W-8 is delivered."), {"delivered", "shipped"}
    assert untold(task_of("W-1"), [], answer, known) == ["w-8", "delivered"]
    assert untold(task_of("W-1"), history(call("get_order", "W-1")), answer, known) == ["w-8"]


@pytest.fixture
def buffer() -> ReplayBuffer:
    buffer = ReplayBuffer(":memory:")
    buffer.extend(
        [
            episode("W-2", call("refund", "W-2", "{}"), success=True, answer="Refunded."),
            episode("W-3", success=False, answer="It is delivered."),
            episode("W-4", call("get_order", "W-4"), success=True, answer="It is delivered.", wish="Where is order"),
        ]
    )
    return buffer


def test_the_demonstrations_of_an_answer_are_successes_of_tasks_like_it_not_answers_like_it(buffer: ReplayBuffer) -> None:
    experience = ExperienceModel(None, replay_buffer=buffer, demonstrations=1, instructions="")
    (shown,) = experience.demonstrations("", render_answer("It is delivered."), task_of("W-1"))
    assert json.loads(shown.action)["answer"] == "Refunded." and "after refund(order from the task)" in shown.reasoning
    (own,) = experience.demonstrations("", render_answer("Refunded."), task_of("W-2"))
    assert own.observation == "Where is order W-4.", "never of the same task"


def test_the_prompt_of_an_answer_names_the_calls_so_far(buffer: ReplayBuffer) -> None:
    experience = ExperienceModel(None, replay_buffer=buffer, demonstrations=1, instructions="", writes=WRITES)
    done = episode("W-1", call("refund", "W-1", "{}"), success=True)
    *_, asked, answer = to_conversation(experience, done)
    assert asked.text.endswith("calls so far: refund(order from the task): {}\ntold by nobody: nothing")
    assert answer.text.startswith("valid, needed: refund(order from the task), done: refund(order from the task), it completes")
    assert "calls so far" not in to_conversation(experience, done)[1].text
