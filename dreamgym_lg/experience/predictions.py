"""The forms in which an experience model answers: read strictly, written from records for its training.

Two forms say the same: *lines*, short enough for a small model that is trained on it, and *json*, for a model that is prompted.
"""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from importlib.resources import files
from typing import Any

from dreamgym_lg.environment import INVALID_REWARD
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.types import Prediction, Step


def load_prompt(name: str) -> str:
    """The text of `dreamgym_lg/prompts/<name>.md`. A file is never edited once released: a change is the next number."""
    return files("dreamgym_lg").joinpath("prompts", f"{name}.md").read_text(encoding="utf-8").strip()


LINES_PROMPT, JSON_PROMPT = "experience-2", "experience-3"
"""The system prompts of the two forms."""

INSTRUCTIONS = load_prompt(LINES_PROMPT)
"""The system prompt of the lines. A model trained on the form needs none of it."""

NOTHING = "(nothing)"
"""Stands for an empty observation in the lines; tools do give them."""

FORM = re.compile(
    r"(?P<reasoning>(?P<valid>valid|invalid)\b[^\n]*)\n"
    r"reward (?P<reward>[+-]?\d{1,9}(?:\.\d+)?), (?P<status>continues|success|failure)\n"
    r"(?P<observation>\S.*)",
    re.DOTALL,
)

SCHEMA: Mapping[str, Any] = {
    "title": "prediction",
    "description": "What follows the agent's action.",
    "type": "object",
    "properties": {
        "reasoning": {"type": "string"},
        "valid": {"type": "boolean"},
        "reward": {"type": "number"},
        "terminated": {"type": "boolean"},
        "success": {"type": "boolean"},
        "observation": {"type": "string"},
    },
    "required": ["reasoning", "valid", "reward", "terminated", "success", "observation"],
    "additionalProperties": False,
}
"""The JSON form. The order counts: the verdict follows from the reasoning, the observation from the verdict."""


def parse_prediction(text: str) -> Prediction:
    """Read an answer in lines strictly. Raises `PredictionFailed` with the form and the text if it is not in it."""
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise PredictionFailed(
            f"the experience model answered {text[:200]!r}; expected 'valid|invalid, reasoning' / "
            "'reward <number>, continues|success|failure' / the observation, a line each"
        )
    observation, status = match["observation"].strip(), match["status"]
    return consistent(
        Prediction(
            reasoning=match["reasoning"],
            observation="" if observation == NOTHING else observation,
            reward=float(match["reward"]),
            terminated=status != "continues",
            success=status == "success",
            valid=match["valid"] == "valid",
        )
    )


def parse_json_prediction(text: str) -> Prediction:
    """Read an answer in JSON strictly: these keys, these types. Raises `PredictionFailed` saying what is wrong."""
    found = json_object(text)
    wanted = {key: kind["type"] for key, kind in SCHEMA["properties"].items()}
    if found.keys() != wanted.keys():
        raise PredictionFailed(f"the answer has the keys {sorted(found)}; expected {', '.join(wanted)}")
    for key, kind in wanted.items():
        if not _is(found[key], kind):
            raise PredictionFailed(f"{key!r} in the answer is {str(found[key])[:80]!r}; expected a {kind}")
    return consistent(Prediction(**{**found, "reward": float(found["reward"])}))


def consistent(said: Prediction) -> Prediction:
    """What was said, as far as it can be believed.

    An invalid action earns `INVALID_REWARD` and ends nothing; success needs a valid action that ends the episode and earned
    something (closed_loop.md: a success that pays without progress is how a dream lies). A success that is not believed
    ends nothing either.
    """
    success = said.valid and said.terminated and said.success and said.reward > 0
    ended = said.valid and said.terminated and (success or not said.success)
    return said._replace(reward=said.reward if said.valid else INVALID_REWARD, terminated=ended, success=success)


def json_object(text: str) -> dict[str, Any]:
    """The one JSON object that the text is, a code fence or a thinking block around it aside; else `PredictionFailed`."""
    bare = re.sub(r"\A\s*<think>.*?</think>", "", text, flags=re.DOTALL).strip()
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*)\n\s*```", bare, flags=re.DOTALL)
    try:
        found = json.loads(fenced[1] if fenced else bare)
    except (ValueError, RecursionError) as error:
        raise PredictionFailed(f"the answer {text[:200]!r} is not JSON ({error}); expected one JSON object") from None
    if not isinstance(found, dict):
        raise PredictionFailed(f"the answer {text[:200]!r} is JSON, but no object; expected one JSON object")
    return found


def _is(value: Any, kind: str) -> bool:
    if kind == "number":  # a boolean is an int to Python
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9 and math.isfinite(value)
    return isinstance(value, str if kind == "string" else bool)


def render_prediction(prediction: Prediction) -> str:
    """The lines that `parse_prediction` reads, the reward to six digits: what the experience model is trained to answer.

    Reasoning that does not begin with the verdict or has several lines (an annotation) is put behind it, on one.
    """
    verdict = "valid" if prediction.valid else "invalid"
    first = prediction.reasoning
    if "\n" in first or not re.match(rf"{verdict}\b", first):
        first = ", ".join(part for part in (verdict, " ".join(first.split())) if part)
    status = "success" if prediction.success else "failure" if prediction.terminated else "continues"
    reward = f"{Decimal(f'{prediction.reward:g}'):f}"  # `g` alone writes 1e-05
    return f"{first}\nreward {reward}, {status}\n{prediction.observation.strip() or NOTHING}"


def in_hindsight(step: Step, *, success: bool) -> Prediction:
    """The prediction that a recorded step should have got (paper, section 4: reasoning is annotated in hindsight).

    Its reasoning is the step's own where `annotate` wrote one, else one line that judges the action by what came of it.
    """
    ended = step.terminated
    if not step.valid:
        reasoning = step.reasoning or "invalid, it is not understood"
        return Prediction(reasoning, step.next_observation, INVALID_REWARD, False, False, False)
    if ended and success:
        verdict = "it completes the task"
    elif step.reward > 0:
        verdict = "it brings progress"
    elif ended:
        verdict = "it fails the task"
    else:
        verdict = "it undoes progress" if step.reward < 0 else "no progress yet"
    reasoning = step.reasoning or f"valid, {verdict}"
    return Prediction(reasoning, step.next_observation, step.reward, ended, ended and success, True)
