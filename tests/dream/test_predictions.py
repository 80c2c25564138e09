"""Answers: what is not in their format is refused, and what they cannot mean is not believed."""

import json
import random
from typing import Any

import pytest

from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.experience.predictions import believed, in_hindsight, json_object, load_prompt
from dreamgym_lg.experience.prompt_formats import JSON_PROMPT, LINE_PROMPT, JsonFormat, LineFormat
from dreamgym_lg.types import Prediction, Step

LINES, JSON = LineFormat(), JsonFormat()


def step(**fields: object) -> Step:
    return Step(**{"observation": "a room", "action": "act", "next_observation": "another room", **fields})  # type: ignore[arg-type]


def test_an_answer_in_the_form_is_read() -> None:
    answer = "  valid, the door gives way\nreward 0.5, continues\nThe door is open.\n\n- a table \n"
    reasoning = "valid, the door gives way"
    assert LINES.read(answer) == Prediction(reasoning, "The door is open.\n\n- a table", 0.5, False, False, True)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "The door is open.",
        "valid",
        "valid, why\nreward 1, success",  # no observation
        "valid, why\nreward 1, success\n \n",
        "valid, why\nThe door is open.",
        "reward 1, success\nThe door is open.",
        "Valid, why\nreward 1, continues\no",
        "valuable, why\nreward 1, continues\no",
        "validity, why\nreward 1, continues\no",
        "Sure!\nvalid, why\nreward 1, continues\no",
        "```\nvalid, why\nreward 1, continues\no\n```",
        "valid, why\nand why not\nreward 1, continues\no",  # reasoning on two lines
        "valid, why\nReward 1, continues\no",
        "valid, why\nreward one, continues\no",
        "valid, why\nreward nan, continues\no",
        "valid, why\nreward inf, continues\no",
        "valid, why\nreward 1e3, continues\no",
        "valid, why\nreward .5, continues\no",
        f"valid, why\nreward {'9' * 400}, continues\no",  # as a float it is infinite
        "valid, why\nreward 1,continues\no",
        "valid, why\nreward 1, done\no",
        "valid, why\nreward 1, success!\no",
        "valid, why\nreward 1, Success\no",
        '{"valid": true, "reward": 1, "observation": "o"}',
    ],
)
def test_any_other_answer_is_refused_with_the_form_and_the_answer(answer: str) -> None:
    with pytest.raises(PredictionFailed, match="expected 'valid|invalid, reasoning'") as caught:
        LINES.read(answer)
    assert repr(answer[:200]) in str(caught.value)


@pytest.mark.parametrize("status", ["continues", "success", "failure"])
@pytest.mark.parametrize("reward", ["0", "1", "-1"])
def test_an_invalid_action_earns_nothing_and_ends_nothing(reward: str, status: str) -> None:
    read = believed(LINES.read(f"invalid, there is no such thing\nreward {reward}, {status}\nWhat?"))
    assert read == Prediction("invalid, there is no such thing", "What?", 0.0, False, False, False)


@pytest.mark.parametrize(
    ("reward", "status", "terminated", "success"),
    [
        ("1", "success", True, True),
        ("0.01", "success", True, True),
        ("0", "success", False, False),
        ("-1", "success", False, False),
        ("0", "failure", True, False),
        ("1", "failure", True, False),
        ("1", "continues", False, False),
    ],
)
def test_only_a_valid_action_that_earned_something_succeeds(reward: str, status: str, terminated: bool, success: bool) -> None:
    read = believed(LINES.read(f"valid, why\nreward {reward}, {status}\nThe end."))
    assert (read.reward, read.terminated, read.success) == (float(reward), terminated, success)


@pytest.mark.parametrize("seed", range(50))
def test_what_is_written_is_read_as_it_was(seed: int) -> None:
    rng = random.Random(seed)
    valid = rng.random() < 0.7
    reward = float(f"{rng.choice([0, 1, -1, 0.25, 1e-5, -3e-7, 123456, 1e6, rng.uniform(-2, 2)]):g}") if valid else 0.0
    success = valid and reward > 0 and rng.random() < 0.5
    terminated = success or (valid and rng.random() < 0.3)
    # An observation may look like the form itself, or like an action.
    parts = ["A door.", "> open door", "valid, why", "invalid", "reward 1, success", "料理 – ü", "  in", "", "a\tb\r"]
    observation = "\n".join(["Here:", *rng.choices(parts, k=rng.randint(0, 6)), "."])
    reasoning = ("valid" if valid else "invalid") + rng.choice(["", ", it fits", ", reward 1, success", ", > x"])
    prediction = Prediction(reasoning, observation, reward, terminated, success, valid)
    assert LINES.read(LINES.answer(prediction)) == prediction


@pytest.mark.parametrize(
    ("fields", "success", "reasoning"),
    [
        ({"reward": 0.5}, True, "valid, it brings progress"),
        ({"reward": 0.5, "terminated": True}, True, "valid, it completes the task"),
        ({"reward": 0.5, "terminated": True}, False, "valid, it brings progress"),
        ({"reward": 0.0, "terminated": True}, False, "valid, it fails the task"),
        ({"reward": -0.5}, False, "valid, it undoes progress"),
        ({}, False, "valid, no progress yet"),
        ({"valid": False}, True, "invalid, it is not understood"),
    ],
)
def test_a_record_is_annotated_in_hindsight_with_what_came_of_it(
    fields: dict[str, object], success: bool, reasoning: str
) -> None:
    prediction = in_hindsight(step(**fields), success=success)
    assert prediction.reasoning == reasoning
    assert prediction.success == (success and "terminated" in fields and "valid" not in fields)
    assert LINES.read(LINES.answer(prediction)) == prediction


def test_an_annotated_step_keeps_its_own_reasoning_and_is_written_on_one_line_behind_the_verdict() -> None:
    prediction = in_hindsight(step(reward=1.0, reasoning="The key fits.\nSo it opens."), success=False)
    assert prediction.reasoning == "The key fits.\nSo it opens."
    assert LINES.answer(prediction).splitlines()[0] == "valid, The key fits. So it opens."
    refused = in_hindsight(step(valid=False, reasoning="valid though it looks, nothing is there"), success=False)
    assert LINES.answer(refused).startswith("invalid, valid though it looks, nothing is there\nreward 0, continues\n")


def test_an_empty_observation_survives() -> None:
    """Tools may answer nothing at all."""
    prediction = Prediction("valid, why", "", 1.0, True, True, True)
    assert LINES.read(LINES.answer(prediction)) == prediction


# --- JSON -----------------------------------------------------------------------------------------------------------

GOOD = {"reasoning": "it fits", "valid": True, "reward": 1, "terminated": True, "success": True, "observation": "Done."}


@pytest.mark.parametrize("form", ["%s", " %s\n", "```json\n%s\n```", "```\n%s\n```", "<think>{hm}</think>\n%s"])
def test_a_json_answer_is_read(form: str) -> None:
    assert JSON.read(form % json.dumps(GOOD)) == Prediction("it fits", "Done.", 1.0, True, True, True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("", "is not JSON"),
        ("Sure: " + json.dumps(GOOD), "is not JSON"),
        (json.dumps(GOOD)[:-9], "is not JSON"),
        (json.dumps(GOOD) + json.dumps(GOOD), "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (json.dumps([GOOD]), "no object"),
        ("true", "no object"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "valid"}), "has the keys"),
        (json.dumps({**GOOD, "note": ""}), "has the keys"),
        (json.dumps({**GOOD, "valid": "true"}), "'valid' in the answer is 'true'; expected a boolean"),
        (json.dumps({**GOOD, "success": 1}), "'success' in the answer is '1'; expected a boolean"),
        (json.dumps({**GOOD, "reward": True}), "'reward'"),
        (json.dumps({**GOOD, "reward": "1"}), "'reward'"),
        (json.dumps({**GOOD, "reward": float("nan")}), "'reward'"),
        (json.dumps({**GOOD, "reward": 1e300}), "'reward'"),
        (json.dumps({**GOOD, "observation": None}), "'observation'"),
        (json.dumps({**GOOD, "observation": {"a": 1}}), "'observation'"),
    ],
)
def test_any_other_json_answer_is_refused_saying_what_is_wrong(answer: str, said: str) -> None:
    with pytest.raises(PredictionFailed, match=said):
        JSON.read(answer)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, (1.0, True, True)),
        ({"valid": False}, (0.0, False, False)),
        ({"valid": False, "reward": -3}, (0.0, False, False)),
        ({"reward": 0}, (0.0, False, False)),
        ({"terminated": False}, (1.0, False, False)),
        ({"success": False}, (1.0, True, False)),
        ({"success": False, "terminated": False, "reward": 0.5}, (0.5, False, False)),
    ],
)
def test_only_what_is_consistent_is_believed(said: dict[str, Any], expected: tuple[float, bool, bool]) -> None:
    read = believed(JSON.read(json.dumps({**GOOD, **said})))
    assert (read.reward, read.terminated, read.success) == expected


def test_a_json_object_may_hold_anything() -> None:
    assert json_object('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


def test_the_prompts_show_the_format_and_explain_the_hidden_fact() -> None:
    form = '<"valid" or "invalid">, <your reasoning about the action, on this one line>\nreward <number>, <continues'
    assert form in load_prompt(LINE_PROMPT) and "next in line:" in load_prompt(LINE_PROMPT)
    assert all(f'"{key}"' in load_prompt(JSON_PROMPT) for key in [*GOOD, "hidden", "score", "seen", "action"])


@pytest.mark.parametrize(
    ("score", "reward", "success"),
    [(1, 0, True), (sum([0.1] * 10), 0, True), (0, 50, True), (3, 0, True), (0.5, 0, False), (1, -0.5, False)],
)
def test_a_success_without_reward_needs_a_full_score(score: float, reward: float, success: bool) -> None:
    """A model that paid for the last call has nothing left to pay for the answer."""
    read = believed(Prediction("it ends", "", reward, True, True, True), score)
    assert (read.success, read.terminated) == (success, success)
