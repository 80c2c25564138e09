"""A dream's verdicts behind recorded history: false successes and failures, invalid actions, and answers that agree."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dreamgym_lg.actions import is_answer, render_answer, render_call
from dreamgym_lg.dream import Dream, Model, ModelJudge, Recorded, Verdict
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.errors import ModelUnavailable
from dreamgym_lg.fidelity.judgement import INVALID, MISSED, WRITTEN, Judgement, ajudge, keys_of
from dreamgym_lg.fidelity.judgement import LOOKUP as AGAIN
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

LOOKUP, CANCEL = render_call("lookup", {"id": 1}), render_call("cancel", {"id": 1})
OPEN, CANCELLED = '{"status": "open"}', '{"status": "cancelled", "refund": 20}'
DONE = render_answer("It is cancelled.")


def episode(*steps: tuple[str, str], name: str = "t", success: bool, tools: bool = True, **fields: Any) -> Trajectory:
    own = ["lookup", "cancel"] if tools else None
    task = Task(id=name, instruction="Cancel order 1.", environment="desk", observation="Cancel order 1.", tools=own)
    seen, made = "Cancel order 1.", []
    for number, (action, answer) in enumerate(steps, start=1):
        last, valid = number == len(steps), answer != "What?"
        end = {"terminated": last, "reward": float(last and success), "valid": valid}
        made.append(Step(observation=seen, action=action, next_observation=answer, **end))  # type: ignore[arg-type]
        seen = answer
    return Trajectory(task=task, steps=made, success=success, run=fields.pop("run", "traces"), **fields)


WHOLE = episode((LOOKUP, OPEN), (CANCEL, '{"done": true}'), (LOOKUP, CANCELLED), (DONE, ""), success=True)
LAZY = episode((LOOKUP, OPEN), (DONE, ""), success=False)


def dream_of(reply: Any, scripted: Any) -> Dream:
    model = Model(scripted(reply=reply), prompt_format="lines", retries=0, version="v")
    return Dream([model], judges=[ModelJudge(model)])


async def judged(reply: Any, episodes: Sequence[Trajectory], scripted: Any) -> Judgement:
    return await ajudge(dream_of(reply, scripted), episodes, writes={"cancel"})


def remembers(*, shows: str = CANCELLED, again: str = OPEN) -> Any:
    """A dream that rewards what was cancelled. Args: `shows`, a lookup after the cancelling; `again`, one before."""

    def reply(messages: Any) -> str:
        action = messages[-1].text.rsplit("> ", 1)[1].partition("\n")[0]
        cancelled = any(f"> {CANCEL}" in message.text for message in messages)
        if is_answer(action):
            return f"why\n{'success' if cancelled else 'failure'}"
        return f"valid, why\nreward 0, continues\n{shows if cancelled else again}"

    return reply


async def test_a_recorded_answer_that_misfits_the_tools_schema_is_the_dreams(scripted: Any) -> None:
    """The tool returns a dict, and answered with a text: the model was measured in its place."""
    tools = [{"type": "function", "function": {"name": "lookup", "returns": {"type": "object"}}}]
    traces = [episode((LOOKUP, "no such order"), (DONE, ""), name=name, success=True) for name in ("t", "u")]
    traces = [replace(each, task=replace(each.task, tools=tools)) for each in traces]
    model = dream_of(remembers(), scripted).responders[0]
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend(traces)
        found = await ajudge(Dream([Recorded(TraceIndex(buffer, writes=[])), model]), traces)
    (recorded, other) = found.parts
    assert recorded.errors[AGAIN][:2] == found.errors[AGAIN][:2] == (0, 2) and other.errors[AGAIN].value == 1


async def test_a_true_dream_rewards_what_it_must_and_shows_what_was_written(scripted: Any) -> None:
    found = await judged(remembers(), [WHOLE, LAZY], scripted)
    assert found.false_success and (found.false_success.successes, found.false_success.episodes) == (0, 1)
    assert {kind: tuple(rate[:2]) for kind, rate in found.errors.items() if kind not in found.by_kind} == {
        **{MISSED: (0, 1), AGAIN: (0, 2), WRITTEN: (0, 1)}
    }


async def test_a_dream_that_forgets_what_it_said_and_what_was_written(scripted: Any) -> None:
    found = await judged(remembers(shows=OPEN, again='{"status": "lost"}'), [WHOLE, LAZY], scripted)
    assert found.errors[AGAIN].value == found.errors[WRITTEN].value == 1
    shown = await judged(remembers(shows='{"refund": 20, "status": "cancelled", "by": "you"}'), [WHOLE], scripted)
    assert shown.errors[WRITTEN].value == 0, "all that is new is there"


async def test_false_successes_by_kind_and_by_judge_with_the_episodes_of_a_task_as_one(scripted: Any) -> None:
    edits = [episode((DONE, ""), name=f"t{n % 2}", success=False, run="edited/no_call") for n in range(24)]
    own = episode((DONE, ""), name="own", success=False, source="real", run="validate/real")
    found = await judged(lambda _: "why\nsuccess", [*edits, LAZY, own, WHOLE], scripted)
    assert {kind: rate.episodes for kind, rate in found.by_kind.items()} == {
        "edited/no_call": 24,
        "recorded failures": 1,
        "the policy's failures": 1,
    }
    assert found.false_success and found.false_success.value == 1
    (judge,) = (part for part in found.parts if part.role == "judge")
    assert judge.name == "model" and judge.errors["edited/no_call"] == found.by_kind["edited/no_call"]
    assert len(judge.examples["edited/no_call"]) == 3 and "last action" in judge.examples["edited/no_call"][0]
    assert found.by_kind["edited/no_call"].low < 0.5, "24 episodes of 2 tasks are not 24 trials"
    assert found.version == "v" and Judgement.from_dict(json.loads(json.dumps(found.to_dict()))) == found


async def test_every_step_of_a_failure_without_tools_is_asked(scripted: Any) -> None:
    def reply(messages: Any) -> str:
        action = messages[-1].text.rsplit("> ", 1)[1].partition("\n")[0]
        if action == "dance":
            return "invalid, why\nreward 0, continues\nWhat?"
        return "valid, why\nreward 1, success\nYou win." if action == "wait" else "valid, why\nreward 0, continues\nNothing."

    steps = [("dance", "What?"), ("jump", "What?"), ("wait", "Time passes."), ("look", "A room.")]
    found = await judged(reply, [episode(*steps, success=False, tools=False)], scripted)
    assert found.false_success and found.false_success.value == 1, "rewarded on the way"
    assert found.errors[INVALID][:2] == (1, 2) and AGAIN not in found.errors


async def test_of_a_success_without_tools_the_last_step_and_the_invalid_ones_are_asked(scripted: Any) -> None:
    asked = list[str]()

    def reply(messages: Any) -> str:
        asked.append(messages[-1].text.rsplit("> ", 1)[1].partition("\n")[0])
        return "valid, why\nreward 1, success\nYou win."

    won = episode(("look", "A room."), ("jump", "What?"), ("wait", "You win."), success=True, tools=False)
    found = await judged(reply, [won], scripted)
    assert asked == ["jump", "wait"]
    assert found.errors[MISSED].value == 0 and found.false_success is None


async def test_an_answer_that_cannot_be_read_rewards_nothing_and_a_server_that_is_down_is_no_verdict(scripted: Any) -> None:
    found = await judged(lambda _: "no form at all", [WHOLE, LAZY], scripted)
    assert found.false_success and found.false_success.value == 0
    assert found.errors[MISSED].value == found.errors[AGAIN].value == 1

    def down(_: Any) -> str:
        raise ModelUnavailable("the server is away")

    with pytest.raises(ModelUnavailable):
        await judged(down, [WHOLE], scripted)


async def test_a_trace_without_an_end_is_neither_rewarded_nor_missed(scripted: Any) -> None:
    cut = episode((LOOKUP, OPEN), (LOOKUP, OPEN), success=False)
    found = await judged(lambda _: "why\nsuccess", [cut], scripted)
    assert found.false_success is None and AGAIN in found.errors


def test_the_digest_tells_choices_of_episodes_apart_and_not_their_order() -> None:
    other = episode((DONE, ""), name="u", success=False)
    assert keys_of([WHOLE, other]) == keys_of([other, WHOLE]) != keys_of([WHOLE])


@pytest.mark.parametrize("read", [True, False])
async def test_what_a_judge_leaves_to_the_next_one_is_its_error_only_where_the_dream_rewards_it(
    scripted: Any, read: bool
) -> None:
    class Calls:
        name = "calls"

        def judge(self, episode: Any, answer: Any) -> Verdict:
            return Verdict(1, True, final=False)

    model = Model(scripted(reply=lambda _: f"why\n{'failure' if read else 'success'}"), prompt_format="lines", retries=0)
    found = await ajudge(Dream([model], judges=[Calls(), ModelJudge(model)]), [WHOLE, LAZY], writes={"cancel"})
    calls, reader = (part for part in found.parts if part.role == "judge")
    assert [calls.errors[kind].value for kind in ("recorded failures", "recorded successes")] == [float(not read), 0]
    assert [reader.errors[kind].value for kind in ("recorded failures", "recorded successes")] == [float(not read), float(read)]
    assert found.false_success and found.false_success.value == float(not read)
