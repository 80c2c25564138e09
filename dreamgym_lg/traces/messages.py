"""Recorded messages in any of their written forms, as LangChain messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
    messages_from_dict,
)

from dreamgym_lg.actions import tool_schemas

_ROLES = {"human", "user", "ai", "assistant", "model", "system", "developer", "tool", "function", "chat", "remove"}
_CALLS, _RESULTS = {"tool_call", "tool_use"}, {"tool_call_response", "tool_result"}
_HOLDERS = ("messages", "generations", "choices", "message", "output", "input")


def is_message(value: object) -> bool:
    """True if `value` looks like one message, in any form."""
    if not isinstance(value, Mapping):
        return isinstance(value, BaseMessage)
    if value.get("lc") == 1:
        return _role(value).removesuffix("chunk") in _ROLES
    return _role(value) in _ROLES and not {"content", "parts", "data", "tool_calls"}.isdisjoint(value)


def messages_of(value: object) -> list[BaseMessage]:
    """The messages in the inputs or outputs of a call, wherever its framework puts them; the first choice of several."""
    if is_message(value):
        return to_messages([value])
    if isinstance(value, Mapping):
        return next((held for key in _HOLDERS if (held := messages_of(value.get(key)))), [])
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return to_messages(value) if is_message(value[0]) else messages_of(value[0])
    return []


def to_messages(values: object) -> list[BaseMessage]:
    """Messages in LangChain's `messages_to_dict`, `model_dump` or `dumpd` form, or in OpenAI's, Anthropic's or OpenTelemetry's.

    Raises `ValueError` that names the first one that is none of these.
    """
    if not isinstance(values, Sequence) or isinstance(values, str):
        missing = "there is no key `messages` with" if values is None else f"the messages are {_short(values)}, not"
        raise ValueError(f"{missing} a list of messages")
    messages: list[BaseMessage] = []
    for position, value in enumerate(values, 1):
        try:
            messages += _converted(value)
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RecursionError) as error:
            # A file may hold anything, and LangChain's own conversion raises each of these.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"message {position} cannot be read ({reason[:120]}): {_short(value)}") from error
    return messages


def _converted(value: Any) -> list[BaseMessage]:
    if isinstance(value, BaseMessage):
        return [value]
    if not is_message(value):
        raise ValueError("not a message: it has no known role or type, or no content")
    if isinstance(value.get("data"), Mapping):
        return messages_from_dict([dict(value)])
    fields = dict(value["kwargs"] if value.get("lc") == 1 else value)
    role = _role(value).removesuffix("chunk")
    blocks = fields.get("parts") or fields.get("content")
    if isinstance(blocks, list) and ("parts" in fields or not fields.get("tool_calls") and role != "tool"):
        kinds = {block.get("type") for block in blocks if isinstance(block, Mapping)}
        if "parts" in fields or kinds & (_CALLS | _RESULTS):
            return _of_blocks(role, blocks)
    fields.pop("type", None)
    fields.update(role="ai" if role == "model" else role, content=fields.get("content"))
    calls, invalid = _calls(fields.pop("tool_calls", None) or ())
    if role not in ("ai", "assistant", "model"):
        return convert_to_messages([fields])
    invalid += fields.pop("invalid_tool_calls", None) or []
    (message,) = convert_to_messages([{**fields, "tool_calls": calls} if calls else fields])
    # LangChain's conversion files these under its extras.
    return [AIMessage(**{**dict(message), "invalid_tool_calls": invalid}) if invalid else message]


def _role(value: Mapping[str, Any]) -> str:
    if value.get("lc") == 1:
        names = value.get("id")
        if isinstance(names, list) and names and isinstance(value.get("kwargs"), Mapping):
            return str(names[-1]).lower().replace("message", "")
        return ""
    role = value.get("role") or value.get("type")
    return str(role).lower().replace("messagechunk", "") if isinstance(role, str) else ""


def _calls(recorded: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Calls in LangChain's form, and those whose arguments are no JSON object."""
    calls, invalid = [], []
    for call in recorded:
        function = call.get("function") or call
        arguments = decoded(function.get("arguments", function.get("args", function.get("input"))))
        named = {"name": function["name"], "id": call.get("id")}
        if isinstance(arguments, Mapping) or arguments in (None, ""):
            calls.append({**named, "args": dict(arguments or {}), "type": "tool_call"})
        else:
            invalid.append({**named, "args": as_text(arguments), "error": "no JSON object", "type": "invalid_tool_call"})
    return calls, invalid


def _of_blocks(role: str, blocks: Sequence[Any]) -> list[BaseMessage]:
    """A message whose calls and results lie among its content: OpenTelemetry's parts, Anthropic's blocks."""
    parts = [block if isinstance(block, Mapping) else {"type": "text", "content": str(block)} for block in blocks]
    messages: list[BaseMessage] = []
    for part in parts:
        if part.get("type") in _RESULTS:
            result = part.get("response", part.get("result", part.get("content")))
            answers = str(part.get("id") or part.get("tool_use_id") or "")
            status = "error" if part.get("is_error") else "success"
            messages.append(ToolMessage(as_content(result), tool_call_id=answers, status=status))
    calls, invalid = _calls([part for part in parts if part.get("type") in _CALLS])
    content: list[Any] = [_block(part) for part in parts if part.get("type") not in _CALLS | _RESULTS]
    if role in ("ai", "assistant", "model"):
        text = "".join(block["text"] for block in content if block["type"] == "text")
        messages.append(AIMessage(text, tool_calls=calls, invalid_tool_calls=invalid))
    elif content:
        messages.append((SystemMessage if role in ("system", "developer") else HumanMessage)(content))
    return messages


def _block(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type", "text") == "text":
        return {"type": "text", "text": str(part.get("content", part.get("text", "")))}
    return {"type": str(part.get("modality") or part["type"])}


def recorded_tools(value: object) -> list[dict[str, Any]]:
    """The tools that a row or a model call says it had, as function schemas. Raises `ValueError` for what are none."""
    value = decoded(value)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError(f"its tools are {_short(value)}, not a list of function schemas")
    try:
        tools = tool_schemas(value)
    except Exception as error:  # LangChain's conversion raises what each form brings
        raise ValueError(f"its tools cannot be read ({type(error).__name__}: {error}): {_short(value)}") from error
    if not all(isinstance(tool["function"].get("name"), str) for tool in tools):
        raise ValueError(f"its tools cannot be read (one has no name): {_short(value)}")
    return tools


def decoded(value: object) -> Any:
    """`value`, or what it holds if it is a text of JSON."""
    try:
        return json.loads(value, strict=False) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def as_text(value: object) -> str:
    """A tool's return value, as an agent reads it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def as_content(value: object) -> str | list[Any]:
    """A tool's result as a message's content: its content blocks, or text."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "type" in each for each in value):
        return value
    return "" if value is None else as_text(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
