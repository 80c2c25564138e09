"""What a dream pays, behind recorded history: false successes and failures, invalid actions, and answers that agree."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dreamgym_lg.actions import is_answer, render_answer, render_call
from dreamgym_lg.environment import StepResult
from dreamgym_lg.errors import ModelUnavailable
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.fidelity.conclusions import _of_judgement
from dreamgym_lg.fidelity.judgement import Judgement, ajudge, keys_of
from dreamgym_lg.types import Prediction, Step, Task, Trajectory

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


async def judged(reply: Any, episodes: Sequence[Trajectory], scripted: Any, **options: Any) -> Judgement:
    experience = ExperienceModel(scripted(reply=reply), prompt_format="lines", retries=0)
    return await ajudge(lambda: DreamEnvironment(experience), episodes, version="v", writes={"cancel"}, **options)


def remembers(*, shows: str = CANCELLED, again: str = OPEN) -> Any:
    """A dream that pays what was cancelled. Args: `shows`, a lookup after the cancelling; `again`, one before."""

    def reply(messages: Any) -> str:
        action = messages[-1].text.rsplit("> ", 1)[1].partition("\n")[0]
        cancelled = any(f"> {CANCEL}" in message.text for message in messages[:-1])
        if is_answer(action):
            return f"valid, why\nreward {int(cancelled)}, {'success' if cancelled else 'failure'}\n(nothing)"
        return f"valid, why\nreward 0, continues\n{shows if cancelled else again}"

    return reply


async def test_a_true_dream_pays_what_it_must_and_shows_what_was_written(scripted: Any) -> None:
    found = await judged(remembers(), [WHOLE, LAZY], scripted)
    assert found.false_success and (found.false_success.successes, found.false_success.episodes) == (0, 1)
    assert found.false_failure and (found.false_failure.successes, found.false_failure.episodes) == (0, 1)
    assert found.same_lookup and (found.same_lookup.successes, found.same_lookup.episodes) == (2, 2)
    assert found.lookup_after_write and (found.lookup_after_write.successes, found.lookup_after_write.episodes) == (1, 1)
    assert found.invalid_recall is None


async def test_a_dream_that_forgets_what_it_said_and_what_was_written(scripted: Any) -> None:
    found = await judged(remembers(shows=OPEN, again='{"status": "lost"}'), [WHOLE, LAZY], scripted)
    assert found.same_lookup and found.same_lookup.value == 0
    assert found.lookup_after_write and found.lookup_after_write.value == 0
    shown = await judged(remembers(shows='{"refund": 20, "status": "cancelled", "by": "you"}'), [WHOLE], scripted)
    assert shown.lookup_after_write and shown.lookup_after_write.value == 1, "all that is new is there"


async def test_false_successes_by_kind_and_by_who_decided_with_the_episodes_of_a_task_as_one(scripted: Any) -> None:
    class Decides(DreamEnvironment):
        async def astep(self, action: str) -> StepResult:
            result = await super().astep(action)
            return result._replace(info={**result.info, "decided_by": "model"})

    experience = ExperienceModel(scripted(reply=lambda _: "valid, why\nreward 1, success\n(nothing)"), prompt_format="lines")
    edits = [episode((DONE, ""), name=f"t{n % 2}", success=False, run="edited/answered_at_once") for n in range(24)]
    own = episode((DONE, ""), name="own", success=False, source="real", run="validate/real")
    found = await ajudge(lambda: Decides(experience), [*edits, LAZY, own, WHOLE], version="v", writes={"cancel"})
    assert {kind: rate.episodes for kind, rate in found.by_kind.items()} == {
        "edited/answered_at_once": 24,
        "recorded failures": 1,
        "the policy's failures": 1,
    }
    assert found.false_success and found.false_success.value == 1 and found.by_decision == {"model": found.false_success}
    assert found.by_kind["edited/answered_at_once"].low < 0.5, "24 episodes of 2 tasks are not 24 trials"
    assert Judgement.from_dict(json.loads(json.dumps(found.to_dict()))) == found


async def test_every_step_of_a_world_without_tools_is_asked_but_those_that_its_check_refuses(scripted: Any) -> None:
    def reply(messages: Any) -> str:
        action = messages[-1].text.rsplit("> ", 1)[1].partition("\n")[0]
        if action == "dance":
            return "invalid, why\nreward 0, continues\nWhat?"
        return "valid, why\nreward 1, success\nYou win." if action == "wait" else "valid, why\nreward 0, continues\nNothing."

    steps = [("xyzzy", "What?"), ("dance", "What?"), ("jump", "What?"), ("wait", "Time passes."), ("look", "A room.")]
    game = episode(*steps, success=False, tools=False)
    found = await judged(
        reply, [game], scripted, check_action=lambda task, action, seen: "No such word." if action == "xyzzy" else None
    )
    assert found.false_success and found.false_success.value == 1, "paid on the way"
    assert found.invalid_recall and (found.invalid_recall.successes, found.invalid_recall.episodes) == (1, 2)
    assert found.same_lookup is None


async def test_of_a_success_without_tools_the_last_step_and_the_invalid_ones_are_asked(scripted: Any) -> None:
    asked = list[str]()

    def reply(messages: Any) -> str:
        asked.append(messages[-1].text.rsplit("> ", 1)[1].partition("\n")[0])
        return "valid, why\nreward 1, success\nYou win."

    won = episode(("look", "A room."), ("jump", "What?"), ("wait", "You win."), success=True, tools=False)
    found = await judged(reply, [won], scripted)
    assert asked == ["jump", "wait"]
    assert found.false_failure and found.false_failure.value == 0 and found.false_success is None


async def test_an_answer_that_cannot_be_read_pays_nothing_and_a_server_that_is_down_is_no_verdict(scripted: Any) -> None:
    found = await judged(lambda _: "no form at all", [WHOLE, LAZY], scripted)
    assert found.false_success and found.false_success.value == 0
    assert found.false_failure and found.false_failure.value == 1
    assert found.same_lookup and found.same_lookup.value == 0

    def down(_: Any) -> str:
        raise ModelUnavailable("the server is away")

    with pytest.raises(ModelUnavailable):
        await judged(down, [WHOLE], scripted)


async def test_a_trace_without_an_end_is_neither_paid_nor_missed(scripted: Any) -> None:
    cut = episode((LOOKUP, OPEN), (LOOKUP, OPEN), success=False)
    found = await judged(lambda _: "valid, why\nreward 1, success\n(nothing)", [cut], scripted)
    assert found.false_success is None and found.same_lookup is not None


def test_the_digest_tells_choices_of_episodes_apart_and_not_their_order() -> None:
    other = episode((DONE, ""), name="u", success=False)
    assert keys_of([WHOLE, other]) == keys_of([other, WHOLE]) != keys_of([WHOLE])


def test_a_dream_resumed_behind_steps_goes_on_with_their_score(scripted: Any) -> None:
    model = scripted(reply=lambda _: "valid, why\nreward 0.5, success\nDone.")
    dream = DreamEnvironment(ExperienceModel(model, prompt_format="lines"), rewards="score")
    earlier = Exchange("take it", Prediction("valid, why", "You have it.", 0.8, False, False, True))
    assert dream.resume(WHOLE.task, [earlier]) == "You have it."
    assert dream.step("drop it").reward == pytest.approx(0.2)
    assert "You have it." in model.asked[-1][2].text and dream.resume(WHOLE.task, []) == "Cancel order 1."


COLOURS = "red", "blue", "dark blue"


def next_colour(task: Task, history: Sequence[Exchange], seed: int) -> list[str]:
    """The colour behind the door: what was said of it, else the first by the seed."""
    said = [colour for exchange in history for colour in COLOURS if exchange.prediction.observation == f"It is {colour}."]
    return [(said or [COLOURS[seed]])[0]] * (len(history) + 1)


def reads_its_fact(messages: Any) -> str:
    told = next(colour for colour in COLOURS if colour in messages[-1].text)
    return f"valid, why\nreward 0, continues\nIt is {told}."


@pytest.mark.parametrize(
    ("reply", "named"), [(reads_its_fact, 1), (lambda _: "valid, why\nreward 0, continues\nIt is red.", 0)]
)
async def test_a_dream_has_to_name_the_hidden_fact_that_it_has_drawn(reply: Any, named: int, scripted: Any) -> None:
    steps = ("list", "red, blue, dark blue"), ("open", "It is red."), ("say red", "You say red.")
    door = episode(*steps, success=False, tools=False)
    drawn_alike, drawn_otherwise = (replace(door.task, seed=seed) for seed in (0, 1))
    experience = ExperienceModel(scripted(reply=reply), prompt_format="lines", retries=0, hidden_facts=next_colour)
    found = await ajudge(
        lambda: DreamEnvironment(experience),
        [replace(door, task=drawn_otherwise), replace(door, task=drawn_alike)],
        version="v",
    )
    assert found.facts_told and (found.facts_told.successes, found.facts_told.episodes) == (named, 1), (
        "of the one step that revealed red, where blue is drawn: a list names all, an action names red itself, and where red "
        "is drawn it may be habit"
    )
    assert Judgement.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert any("hidden facts that a step reveals are named" in said.sentence for said in _of_judgement(found))
