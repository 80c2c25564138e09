"""The dream as an environment: it keeps the contract, and pays an outcome or a score between 0 and 1."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dreamgym_lg.actions import render_answer, render_call
from dreamgym_lg.environment import check_environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.types import StepResult, Task

TASK = Task(id="t0", instruction="leave the house", environment="house", observation="A closed door.")
FINE = "valid, why not\nreward 0, continues\nNothing happens."


def play(environment: DreamEnvironment, actions: Sequence[str], task: Task = TASK) -> list[StepResult]:
    environment.reset(task)
    return [environment.step(action) for action in actions]


def test_the_dream_keeps_the_environment_contract(scripted: Any, door_world: Any) -> None:
    environment = DreamEnvironment(ExperienceModel(scripted(reply=door_world)))
    check_environment(environment, TASK, ["go north", "dance", "open door", "go north"])
    check_environment(environment, TASK, ["jump"])
    check_environment(environment, TASK, ["open door"])


def test_a_dreamed_episode(scripted: Any, door_world: Any) -> None:
    environment = DreamEnvironment(ExperienceModel(scripted(reply=door_world)))
    assert environment.reset(TASK) == "A closed door."
    refused = environment.step("dance")
    told = {"success": False, "valid": False, "reasoning": "invalid, it is not understood"}
    assert refused.info == {**told, "decided_by": "model"}
    environment.step("open door")
    last = environment.step("go north")
    assert last[:4] == ("You are outside.", 1.0, True, False) and last.info["success"]
    with pytest.raises(RuntimeError, match=r"call reset\(task\)"):
        environment.step("go north")


def test_stepping_needs_a_reset_and_a_dream_needs_a_first_observation(scripted: Any) -> None:
    environment = DreamEnvironment(ExperienceModel(scripted(reply=lambda _: FINE)))
    with pytest.raises(RuntimeError, match="step before reset"):
        environment.step("open door")
    blank = Task(id="blank", instruction="", environment="", metadata={"observation": "a key of the user's"})
    with pytest.raises(ConfigurationError, match="task 'blank' has no observation and no instruction"):
        environment.reset(blank)


def test_a_dream_refuses_what_the_real_environment_refuses(scripted: Any) -> None:
    def no_magic(task: Task, action: str, observations: Sequence[str]) -> str | None:
        return f"No magic in {task.id}." if "magic" in action else None

    experience = ExperienceModel(scripted(reply=lambda _: FINE))
    for check_action, answer in ((None, None), (no_magic, f"No magic in {TASK.id}.")):
        environment = DreamEnvironment(experience, check_action=check_action)
        assert environment.check_action("magic", [environment.reset(TASK)]) == answer


# --- rewards --------------------------------------------------------------------------------------------------------


def dream(scripted: Any, said: Sequence[str], rewards: Any) -> tuple[DreamEnvironment, Any]:
    """A dream whose model answers with these `reward, status`, one after the other."""
    answers = iter(said)
    model = scripted(reply=lambda _: f"valid, fine\nreward {next(answers)}\nWell.")
    return DreamEnvironment(ExperienceModel(model), rewards=rewards), model


def paid(scripted: Any, said: Sequence[str], rewards: Any) -> list[float]:
    environment, _ = dream(scripted, said, rewards)
    return [result.reward for result in play(environment, [f"act {n}" for n in range(len(said))])]


@pytest.mark.parametrize(
    ("said", "outcome", "score"),
    [
        (["0.5, continues", "0.5, success"], [0, 1], [0.5, 0.5]),
        (["50, success"], [1], [1]),
        (["7, continues", "3, continues", "-2, continues"], [0, 0, 0], [1, 0, -1]),
        (["-1, continues", "0.25, continues", "1, failure"], [0, 0, 0], [0, 0.25, 0.75]),
        (["1, continues", "0, success"], [0, 1], [1, 0]),  # nothing was left to be paid
        (["0.5, continues", "0.25, continues"], [0, 0], [0.5, 0.25]),  # cut here, by a step limit
    ],
)
def test_what_an_episode_pays_is_an_outcome_or_a_clipped_score(
    scripted: Any, said: list[str], outcome: list[float], score: list[float]
) -> None:
    assert paid(scripted, said, "outcome") == outcome
    assert paid(scripted, said, "score") == score
    assert 0 <= sum(outcome) <= 1 and 0 <= sum(score) <= 1


def test_a_full_score_completes_a_task_where_the_world_says_so(scripted: Any) -> None:
    said = [f"valid, fine\nreward {reward}, continues\nWell." for reward in (0.33, 0.33, 0.33)]
    for completes in (True, False):
        answers = iter(said)
        model = scripted(reply=lambda _, answers=answers: next(answers))
        dream = DreamEnvironment(ExperienceModel(model), rewards="score", full_score_completes=completes)
        results = play(dream, ["one", "two", "three"])
        assert [(each.terminated, each.info["success"]) for each in results] == [(False, False)] * 2 + [(completes, completes)]


def test_an_action_is_paid_once_where_the_world_says_so(scripted: Any) -> None:
    """A dream paid for putting the same thing away again, until its score was full."""
    rewards = {"take cup": 0.25, "put cup": 0.25, "drop cup": -0.25, "wait": 0.0}
    actions = ["take cup", "put cup", "wait", "take cup", "put cup", "drop cup", "take cup", "take cup"]
    for once, expected in ((True, [0.25, 0.25, 0, 0, 0, -0.25, 0.25, 0]), (False, [0.25, 0.25, 0, 0.25, 0.25, -0.25, 0.25, 0])):
        answers = iter([f"valid, fine\nreward {rewards[action]}, continues\nWell." for action in actions])
        model = scripted(reply=lambda _, answers=answers: next(answers))
        dream = DreamEnvironment(ExperienceModel(model), rewards="score", pays_once=once)
        assert [each.reward for each in play(dream, actions)] == expected


def test_a_success_that_rests_on_a_second_payment_is_none(scripted: Any) -> None:
    answers = iter(f"valid, fine\nreward 0.5, {status}\nWell." for status in ("continues", "success"))
    model = scripted(reply=lambda _: next(answers))
    dream = DreamEnvironment(ExperienceModel(model), rewards="score", full_score_completes=True, pays_once=True)
    assert [(each.reward, each.terminated) for each in play(dream, ["put cup", "put cup"])] == [(0.5, False), (0.0, False)]


def test_a_score_inside_the_bounds_is_paid_as_it_was_said(scripted: Any) -> None:
    said = [0.1, 0.2, 0.3, -0.1, 0.15]
    assert paid(scripted, [f"{reward}, continues" for reward in said], "score") == said


def test_outcome_is_the_default_and_another_word_is_refused(scripted: Any) -> None:
    experience = ExperienceModel(scripted(reply=lambda _: FINE))
    assert DreamEnvironment(experience).rewards == "outcome"
    with pytest.raises(ConfigurationError, match="unknown rewards 'scores'.*Did you mean 'score'"):
        DreamEnvironment(experience, rewards="scores")  # type: ignore[arg-type]


@pytest.mark.parametrize(("rewards", "shown"), [("outcome", "a score of 3:"), ("score", "a score of 1:")])
def test_the_prompt_shows_the_score_that_the_model_keeps(scripted: Any, rewards: Any, shown: str) -> None:
    """An outcome is paid beside the model's own score, on which it was trained; a score that is paid is the one it sees."""
    environment, model = dream(scripted, ["3, continues", "0, continues"], rewards)
    play(environment, ["one", "two"])
    assert shown in model.asked[-1][-1].text


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("last", [0, 1, 50])
def test_an_answer_judged_a_success_pays_one_whatever_the_model_says_it_is_worth(
    scripted: Any, earlier: float, last: float
) -> None:
    said = {"reasoning": "why", "valid": True, "terminated": False, "success": False, "observation": "", "reward": earlier}
    answers = iter([said, {**said, "reward": last, "terminated": True, "success": True}])
    model = scripted(reply=lambda _: json.dumps(next(answers)))
    environment = DreamEnvironment(ExperienceModel(model, prompt_format="json"))
    environment.reset(TASK)
    environment.show_tools([{"type": "function", "function": {"name": "find"}}])
    call, answer = environment.step(render_call("find", {})), environment.step(render_answer("done"))
    assert call.reward == 0 and answer.terminated
    success = earlier + last > 0  # a success that earned nothing at all is not believed
    assert (answer.reward, answer.info["success"]) == (float(success), success)
