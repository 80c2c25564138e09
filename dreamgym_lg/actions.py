"""A tool agent's actions as text: one JSON object a call, the same in traces, in the dream and in the real environment."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """A tool's name and its arguments, as the policy gave them."""

    name: str
    arguments: Mapping[str, Any]


def render_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The action text of a tool call: `{"name": ..., "arguments": {...}}`, keys sorted, on one line."""
    return json.dumps({"name": name, "arguments": dict(arguments)}, sort_keys=True, ensure_ascii=False, default=str)


def render_answer(text: str) -> str:
    """The action text with which an agent ends its episode: `{"answer": ...}`."""
    return json.dumps({"answer": text}, ensure_ascii=False)


def parse_action(action: str) -> ToolCall | str:
    """A call, or the text of a final answer; `ValueError` if `action` is neither."""
    found = json.loads(action)
    if isinstance(found, dict) and isinstance(found.get("answer"), str):
        return str(found["answer"])
    if isinstance(found, dict) and isinstance(found.get("name"), str) and isinstance(found.get("arguments"), dict):
        return ToolCall(found["name"], found["arguments"])
    raise ValueError(f"{action[:80]!r} is neither a tool call (name, arguments) nor an answer")


@lru_cache(100_000)
def parse_call(action: str) -> ToolCall | None:
    """The call that an action is; None for anything else. Do not change its arguments: they are remembered."""
    try:
        parsed = parse_action(action)
    except ValueError:
        return None
    return parsed if isinstance(parsed, ToolCall) else None


def is_answer(action: str) -> bool:
    """Whether the action is the final answer of a tool agent."""
    try:
        return isinstance(parse_action(action), str)
    except ValueError:
        return False
