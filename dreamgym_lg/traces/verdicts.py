"""The facts beside a conversation's messages: its outcome, its task's metadata, the agent's tools."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dreamgym_lg.actions import tool_schemas
from dreamgym_lg.traces.messages import decoded, first_set, short, unpacked

Range = tuple[float, float]
"""The lowest and the highest reward of a source."""

FIELDS = ("reward", "score", "success", "metadata", "rubric")
"""Keys that a row of any format may have beside its messages."""
FEEDBACK = ("feedback", "feedback_stats", "scores", "annotations")
"""Keys under which exporters have feedback."""

_MEASURES = ("latency", "duration", "second", "time", "ms", "cost", "price", "token", "length", "count")
_SCORES = ("score", "reward", "success", "correct", "rating", "grade", "accura", "quality", "resolve", "solve", "pass", "thumb")
"""Beginnings of a score's words in feedback. `_MEASURES` are those of a measurement, which is no verdict."""
_RUNTIME = re.compile(
    "thread_id|session_id|conversation_id|run_id|run_attempt|request_id|assistant_id|graph_id|revision_id|created_by|"
    "(langgraph|checkpoint|ls|lc|langsmith|langchain|langfuse|traceloop)_.*|checkpoint|__.*",
    re.IGNORECASE,
)
"""Metadata keys that differ between runs of one task. With them every run would be a task of its own."""
_THREAD = ("thread_id", "conversation_id", "session_id", "sessionId")


class Verdict(NamedTuple):
    """How a recorded conversation went."""

    reward: float
    """0 to 1."""
    success: bool


def verdict(fields: Mapping[str, Any], reward_range: Range, reward_key: str | None) -> Verdict | None:
    """The outcome in a row or trace; None without one.

    The feedback of `reward_key`, else `reward` or `score` is the reward, a success above 0 and above the lowest of
    `reward_range` where `success` does not say; else `success` alone, else `feedback`.

    Args: `fields`, of which `feedback` holds values by key (`feedback`); `reward_key`, the feedback to take.

    Raises `ValueError` for what is no number or outside of `reward_range`, and for feedback of which none can be chosen.
    """
    present = {key: value for key, value in fields.items() if value is not None}
    success = finite(present["success"], "success") > 0 if "success" in present else None
    feedback = present.get("feedback") or {}
    if reward_key not in feedback:
        for key in ("reward", "score"):
            if key in present:
                reward = finite(present[key], key)
                is_good = is_success(reward, reward_range) if success is None else success
                return Verdict(scaled(reward, key, reward_range), is_good)
        if success is not None:
            return Verdict(scaled(finite(present["success"], "success"), "success", (0, 1)), success)
    if (chosen := _outcome_key(feedback, reward_range, reward_key)) is None:
        return None
    value = finite(feedback[chosen], f"feedback {chosen!r}")
    return Verdict(scaled(value, f"feedback {chosen!r}", reward_range), is_success(value, reward_range))


def is_success(reward: float, reward_range: Range) -> bool:
    """True if a reward, as recorded, is a success."""
    return reward > max(0, reward_range[0])


def _outcome_key(feedback: Mapping[str, Any], reward_range: Range, reward_key: str | None) -> str | None:
    """The feedback key of the outcome. `reward_key`, the only one, or the only one named like a score and in the range."""
    if reward_key is not None:
        return reward_key if reward_key in feedback else None
    candidates = [key for key in feedback if not _has_word(key, _MEASURES)]
    if len(candidates) > 1:
        low, high = reward_range
        scores = [key for key in candidates if _has_word(key, _SCORES) and low <= finite(feedback[key], repr(key)) <= high]
        if len(scores) != 1:
            raise ValueError(
                f"its feedback has the keys {', '.join(map(repr, sorted(feedback)))}: name the one that is the reward, "
                "load_traces(..., reward_key=KEY) or `dreamgym import --reward-key KEY`"
            )
        candidates = scores
    return next(iter(candidates), None)


def _has_word(key: str, words: tuple[str, ...]) -> bool:
    return any(word.lower().startswith(words) for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", key))


def feedback(recorded: object) -> dict[str, Any]:
    """Feedback as values by key: LangSmith's statistics and lists, Langfuse's scores, Phoenix's annotations."""
    values = defaultdict[str, list[Any]](list)
    if isinstance(recorded, Mapping):
        listed: Iterable[Any] = [
            {**each, "key": key} if isinstance(each, Mapping) else {"key": key, "value": each} for key, each in recorded.items()
        ]
    else:
        listed = [each for each in recorded if isinstance(each, Mapping)] if isinstance(recorded, list) else []
    for each in listed:
        inner = {**each, **(each["result"] if isinstance(each.get("result"), Mapping) else {})}
        value = first_set(inner, "avg", "score", "value")
        if isinstance(value, bool | int | float):
            values[str(inner.get("key") or inner.get("name") or "")].append(value)
    return {key: each[0] if len(each) == 1 else sum(map(float, each)) / len(each) for key, each in values.items()}


def own_metadata(recorded: object) -> dict[str, Any]:
    """The application's metadata of a trace, without keys that differ between runs."""
    fields = recorded if isinstance(recorded, Mapping) else {}
    return {key: value for key, value in fields.items() if isinstance(key, str) and not _RUNTIME.fullmatch(key)}


def thread_of(*places: object) -> str:
    """The first thread id in these objects; else ""."""
    named = (place.get(key) for place in places if isinstance(place, Mapping) for key in _THREAD)
    return next((str(id) for id in named if id and isinstance(id, str | int)), "")


def scaled(reward: float, name: str, reward_range: Range) -> float:
    """The reward on a scale from 0 to 1. Raises `ValueError`, which names it, outside of `reward_range`."""
    low, high = reward_range
    if not low <= reward <= high:
        raise ValueError(
            f"its {name} is {reward:g}, outside {low:g} to {high:g}: give load_traces(..., reward_range=(lowest, highest)), or "
            "`dreamgym import --reward-range LOWEST HIGHEST`, and all are scaled to 0 to 1"
        )
    return (reward - low) / (high - low)


def finite(value: object, name: str) -> float:
    """Read `value` as a float. Raises `ValueError`, which names it, unless it is a finite number or a boolean."""
    if isinstance(value, bool | int | float):
        try:
            if math.isfinite(number := float(value)):
                return number
        except OverflowError:
            pass
    raise ValueError(f"its {name} is {str(value)[:40]!r}, not a finite number")


def recorded_tools(value: object) -> list[dict[str, Any]]:
    """The recorded tools of a row or model call, as function schemas. Raises `ValueError` if they are unreadable."""
    value = decoded(value)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError(f"its tools are {short(value)}, not a list of function schemas")
    declared = [each for tool in value for each in tool.get("functionDeclarations", tool.get("function_declarations", [tool]))]
    try:
        tools = tool_schemas(declared)
    except Exception as error:  # LangChain's conversion raises what each form brings
        raise ValueError(f"its tools cannot be read ({type(error).__name__}: {error}): {short(value)}") from error
    if not all(isinstance(tool["function"].get("name"), str) for tool in tools):
        raise ValueError(f"its tools cannot be read (one has no name): {short(value)}")
    return tools


def without_schemas(inputs: Any) -> tuple[Any, list[Any]]:
    """Inputs, and the tools' schemas among them. Langfuse's handler for LangChain puts these behind the messages."""
    messages = unpacked(inputs)
    schemas = [each["content"] for each in messages if _is_schema(each)] if isinstance(messages, list) else []
    return ([each for each in messages if not _is_schema(each)] if schemas else inputs), schemas


def _is_schema(message: Any) -> bool:
    if not isinstance(message, Mapping) or message.get("role") != "tool" or "tool_call_id" in message:
        return False
    content = message.get("content")
    function = content.get("function") if isinstance(content, Mapping) and content.get("type") == "function" else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
