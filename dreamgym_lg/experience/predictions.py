"""What the prompt formats share: reading JSON, what of an answer is believed, and the right answer to a recorded step."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from dreamgym_lg.actions import parse_call
from dreamgym_lg.environment import INVALID_REWARD
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.types import Prediction, Step

_FULL_SCORE = 1 - 1e-6
"""From here on a score counts as 1: sums of tenths fall short of it by rounding."""


class Exchange(NamedTuple):
    """One step of an episode that the experience model answered."""

    action: str
    prediction: Prediction
    demonstrations: tuple[Step, ...] = ()
    """The retrieved transitions that its prompt showed."""


def load_prompt(name: str) -> str:
    """The text of `dreamgym_lg/prompts/<name>.md`. A file is never edited once released: a change is the next number."""
    return files("dreamgym_lg").joinpath("prompts", f"{name}.md").read_text(encoding="utf-8").strip()


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


def believed(said: Prediction, score: float = 0.0) -> Prediction:
    """The prediction without what contradicts itself. Args: `score`, the sum of the episode's rewards before it.

    An invalid action earns `INVALID_REWARD` and ends nothing. A success needs a valid action that ends the episode and raises
    the score, or leaves it at 1 or more: a dream that calls successes without progress misleads the policy (closed_loop.md).
    A success that is not believed ends nothing either.
    """
    earned = said.reward > 0 or score + said.reward >= _FULL_SCORE
    success = said.valid and said.terminated and said.success and earned
    ended = said.valid and said.terminated and (success or not said.success)
    return said._replace(reward=said.reward if said.valid else INVALID_REWARD, terminated=ended, success=success)


def check_structure(
    prediction: Prediction, action: str, found: Sequence[Step], answers: Callable[[str], Iterable[str]]
) -> None:
    """Raise `PredictionFailed` if a tool answers in another structure than its recorded answers have.

    If every demonstration of the same tool is a JSON object (or a list), so must the answer be. Plain text is an error: of an
    invalid action, or of a tool that has been recorded to answer so. Args: `answers`, the recorded answers of a tool.
    """
    called = _called(action)
    if called is None or not prediction.valid:
        return
    recorded = [_container(step.next_observation) for step in found if step.valid and _called(step.action) == called]
    said = _container(prediction.observation)
    if recorded and recorded[0] is not None and len(set(recorded)) == 1 and said != recorded[0]:
        if said is None and any(_container(answer) is None for answer in answers(called)):
            return
        raise PredictionFailed(
            f"the observation {prediction.observation[:120]!r} is no JSON {recorded[0]}, which every recorded answer of the "
            f"tool {called!r} is"
        )


def check_returns(prediction: Prediction, action: str, functions: Iterable[Mapping[str, Any]]) -> None:
    """Raise `PredictionFailed` if a tool whose schema says what it `returns` answers something else.

    Args: `functions`, the schemas of the tools. Types, items, required keys, `enum` and `const` are looked at, no further
    keywords.
    """
    called = _called(action)
    returns = next((function.get("returns") for function in functions if function["name"] == called), None)
    if returns is None or not prediction.valid:
        return
    try:
        fits = _fits(json.loads(prediction.observation), returns, returns)
    except (ValueError, RecursionError):
        fits = False
    if not fits:
        raise PredictionFailed(
            f"the observation {prediction.observation[:120]!r} is not what the tool {called!r} returns, JSON of the schema "
            f"{json.dumps(returns, ensure_ascii=False)}"
        )


_TYPES: Mapping[str, tuple[type, ...]] = {
    **{"object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float)},
    **{"boolean": (bool,), "null": (type(None),)},
}


def _fits(value: Any, schema: Any, root: Mapping[str, Any]) -> bool:
    if not isinstance(schema, Mapping):  # true, or nothing said
        return True
    if "$ref" in schema:
        return _fits(value, root.get("$defs", {}).get(schema["$ref"].rpartition("/")[2]), root)
    if "anyOf" in schema or "oneOf" in schema:
        return any(_fits(value, option, root) for option in schema.get("anyOf") or schema["oneOf"])
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if not isinstance(value, _TYPES.get(str(schema.get("type")), (object,))):
        return False
    if isinstance(value, list):
        return all(_fits(item, schema.get("items"), root) for item in value)
    if isinstance(value, dict):
        keys, others = schema.get("properties", {}), schema.get("additionalProperties")
        known = all(key in value for key in schema.get("required", ()))
        return known and all(_fits(item, keys.get(key, others), root) for key, item in value.items())
    return True


def _called(action: str) -> str | None:
    return call.name if (call := parse_call(action)) is not None else None


def _container(text: str) -> str | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return "object" if isinstance(found, dict) else "list" if isinstance(found, list) else None


def in_hindsight(step: Step, *, success: bool) -> Prediction:
    """The prediction that a recorded step should have got (paper, section 4: reasoning is annotated in hindsight).

    Its reasoning is the step's own where `annotate` wrote one, else one line that judges the action by what came of it.
    Args: `success`, whether the episode ended in success.
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
