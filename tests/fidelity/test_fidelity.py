"""What is said of a dream: rates over all rollouts, and verdicts on every step that was really played."""

from collections.abc import Sequence
from typing import Any

import pytest

from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.fidelity import Verdicts, measure_verdicts, summarise
from dreamgym_lg.statistics import wilson
from dreamgym_lg.types import Step, Task, Trajectory

TASK = Task(id="t0", instruction="leave the house", environment="house", observation="A closed door.")


def seen(action: str, outcome: str, reward: float = 0.0, **fields: Any) -> Step:
    return Step(observation="", action=action, next_observation=outcome, reward=reward, **fields)


def recorded(*steps: Step, **fields: Any) -> Trajectory:
    return Trajectory(task=TASK, steps=steps, **fields)


# What really follows in the world that conftest's `door_world` dreams without a fault.
DANCE = seen("dance", "What?", valid=False)
OPEN = seen("open door", "The door is open.", 0.5)
NORTH = seen("go north", "You are outside.", 0.5, terminated=True)


def test_a_summary_counts_every_rollout_failed_ones_as_no_success() -> None:
    found = summarise(
        [
            recorded(DANCE, OPEN, NORTH, success=True),
            recorded(OPEN),
            recorded(DANCE, error="PredictionFailed: what?"),
            recorded(error="EnvironmentFailed: java died"),
        ]
    )
    assert (found["successes"], found["episodes"], found["failed"]) == (1, 4, 2)
    assert found["interval"] == list(wilson(1, 4))
    assert found["invalid_action_share"] == 2 / 5
    assert found["reward_mean"] == (1.0 + 0.5) / 4


def test_a_summary_of_nothing_claims_nothing() -> None:
    found = summarise([])
    assert (found["successes"], found["episodes"], found["failed"]) == (0, 0, 0)
    assert found["interval"] == [0.0, 1.0] and found["invalid_action_share"] == found["reward_mean"] == 0.0


async def test_a_dream_without_a_fault_is_found_to_have_none(scripted: Any, door_world: Any) -> None:
    experience = ExperienceModel(scripted(reply=door_world))
    episodes = [recorded(DANCE, OPEN, DANCE, NORTH, success=True), recorded(seen("jump", "Ouch.", terminated=True))]
    verdicts = await measure_verdicts(experience, episodes)
    assert verdicts == Verdicts(invalid=2, invalid_recognised=2, valid=3, valid_refused=0, reward_errors=0)
    assert verdicts.invalid_recall == 1.0

    model = scripted(reply=door_world)
    recall = await measure_verdicts(ExperienceModel(model), episodes, invalid_only=True)
    assert recall == Verdicts(invalid=2, invalid_recognised=2, valid=0, valid_refused=0, reward_errors=0)
    assert len(model.asked) == 2


async def test_for_the_recall_of_invalid_actions_nothing_is_looked_up_of_episodes_without_any(
    scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[str]()
    monkeypatch.setattr(ExperienceModel, "demonstrations", lambda self, seen, action, *_: looked_up.append(action) or ())
    experience = ExperienceModel(scripted(reply=lambda _: "invalid, why\nreward 0, continues\nWhat?"), prompt_format="lines")
    episodes = [recorded(OPEN, NORTH, success=True), recorded(OPEN, DANCE)]
    assert (await measure_verdicts(experience, episodes, invalid_only=True)).invalid_recall == 1
    assert looked_up == [OPEN.action, DANCE.action]


async def test_each_kind_of_fault_is_counted(scripted: Any, asked_action: Any) -> None:
    replies = {
        "accepted": "valid, why not\nreward 0, continues\nFine.",
        "refused": "invalid, no\nreward 0, continues\nWhat?",
        "overpaid": "valid, why not\nreward 1, continues\nFine.",
        "garbled": "Fine!",
    }
    experience = ExperienceModel(scripted(reply=lambda messages: replies[asked_action(messages)]), retries=0)
    really = {"valid": True, "invalid": False}
    figures = {}
    for action in replies:
        for name, valid in really.items():
            figures[action, name] = await measure_verdicts(experience, [recorded(seen(action, "o", valid=valid))])
    assert figures == {
        ("accepted", "valid"): Verdicts(0, 0, 1, 0, 0),
        ("accepted", "invalid"): Verdicts(1, 0, 0, 0, 0),
        ("refused", "valid"): Verdicts(0, 0, 1, 1, 0),
        ("refused", "invalid"): Verdicts(1, 1, 0, 0, 0),
        ("overpaid", "valid"): Verdicts(0, 0, 1, 0, 1),
        ("overpaid", "invalid"): Verdicts(1, 0, 0, 0, 1),
        ("garbled", "valid"): Verdicts(0, 0, 1, 1, 1),
        ("garbled", "invalid"): Verdicts(1, 0, 0, 0, 1),
    }
    both = [recorded(seen("refused", "o", valid=False)), recorded(seen("accepted", "o", valid=False))]
    assert (await measure_verdicts(experience, both)).invalid_recall == 0.5


async def test_without_an_invalid_action_there_is_nothing_to_recognise(scripted: Any, door_world: Any) -> None:
    experience = ExperienceModel(scripted(reply=door_world))
    assert (await measure_verdicts(experience, [recorded(OPEN, NORTH, success=True)])).invalid_recall is None
    assert (await measure_verdicts(experience, [recorded(error="died")])) == (0, 0, 0, 0, 0)
    assert (await measure_verdicts(experience, [])).invalid_recall is None


@pytest.mark.parametrize(("real", "wrong"), [(0.5, 0), (0.505, 0), (0.52, 1), (0.0, 1), (-0.5, 1)])
async def test_a_reward_may_be_off_by_a_hundredth(scripted: Any, door_world: Any, real: float, wrong: int) -> None:
    experience = ExperienceModel(scripted(reply=door_world))
    verdicts = await measure_verdicts(experience, [recorded(seen("open door", "The door is open.", real))])
    assert verdicts.reward_errors == wrong


async def test_each_step_is_judged_behind_what_really_happened_before_it(scripted: Any) -> None:
    # This dream never opens the door; told that it really is open, it knows the rest.
    def stubborn(messages: Sequence[Any]) -> str:
        really_open = any("The door is open." in message.text for message in messages)
        return f"valid, why\nreward {0.5 if really_open else 0}, continues\nThe door is stuck."

    model = scripted(reply=stubborn)
    verdicts = await measure_verdicts(ExperienceModel(model), [recorded(OPEN, NORTH, success=True)])
    assert verdicts == Verdicts(invalid=0, invalid_recognised=0, valid=2, valid_refused=0, reward_errors=1)
    assert "The door is stuck." not in "".join(message.text for message in model.asked[-1])


async def test_actions_refused_before_any_model_are_not_asked_about(scripted: Any, door_world: Any) -> None:
    def no_dancing(task: Task, action: str, observations: Sequence[str]) -> str | None:
        return "What?" if action == "dance" else None

    model = scripted(reply=door_world)
    verdicts = await measure_verdicts(ExperienceModel(model), [recorded(DANCE, OPEN, DANCE, NORTH)], check_action=no_dancing)
    assert (verdicts.invalid, verdicts.valid, verdicts.invalid_recall) == (0, 2, None)
    assert len(model.asked) == 2 and "dance" not in "".join(message.text for asked in model.asked for message in asked)
