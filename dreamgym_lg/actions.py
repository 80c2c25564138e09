"""A tool agent's actions as text: one JSON object per call."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from langchain_core.messages import InvalidToolCall
from langchain_core.utils.function_calling import convert_to_openai_tool

_SCHEMAS = ("function", "input_schema", "toolSpec", "title", "properties")
"""A tool's schema has at least one of these keys, whatever its provider. A tool that runs at the provider has none."""

FREE_TEXT = "__arg1"
"""LangChain's name for the only argument of a tool of one text, such as an OpenAI custom tool."""
_FREE_TEXT = {"type": "object", "properties": {FREE_TEXT: {"type": "string"}}, "required": [FREE_TEXT]}

STRUCTURED_RESPONSE = "Returning structured response:"
"""Beginning of LangChain's tool message after a call that is the agent's answer (`ToolStrategy`)."""


class ToolCall(NamedTuple):
    """A tool's name and its arguments, as the policy gave them."""

    name: str
    arguments: Mapping[str, Any]


def render_call(name: str, arguments: Mapping[str, Any]) -> str:
    """The action text of a tool call: one line of JSON, keys sorted."""
    return json.dumps({"name": name, "arguments": dict(arguments)}, sort_keys=True, ensure_ascii=False, default=str)


def render_malformed(calls: Sequence[InvalidToolCall]) -> str:
    """The action text of malformed calls. `{"name": ..., "arguments": TEXT}` is neither a call nor an answer."""
    text = "\n".join(call["args"] or "" for call in calls)
    return json.dumps({"name": calls[0]["name"], "arguments": text}, ensure_ascii=False)


def render_answer(text: str, *, call: str = "", tool: str = "") -> str:
    """The action text with which an agent ends its episode: `{"answer": ...}`.

    Args:
        call: Name of the schema that the policy called to give its answer; `text` holds the arguments as JSON.
        tool: Name of the tool whose answer `text` is, where the policy wrote no message after it.
    """
    source = {"call": call} if call else {"tool": tool} if tool else {}
    return json.dumps({"answer": text, **source}, ensure_ascii=False)


def reply_text(action: str) -> str:
    """An action as the policy wrote it. An answer given by a call (`render_answer`) becomes that call."""
    if not is_answer(action) or "call" not in (fields := json.loads(action)):
        return action
    return render_call(fields["call"], json.loads(fields["answer"]))


def is_returned(action: str) -> bool:
    """True for an answer that a tool returned and no policy wrote."""
    return is_answer(action) and "tool" in json.loads(action)


def parse_action(action: str) -> ToolCall | str:
    """A call, or the text of a final answer; `ValueError` if `action` is neither."""
    match json.loads(action):
        case {"answer": str(answer)}:
            return answer
        case {"name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments)
    raise ValueError(f"{action[:80]!r} is neither a tool call (name, arguments) nor an answer")


@lru_cache(100_000)
def parse_call(action: str) -> ToolCall | None:
    """The tool call in an action; None for anything else. Results are cached: do not change their arguments."""
    try:
        parsed = parse_action(action)
    except ValueError:
        return None
    return parsed if isinstance(parsed, ToolCall) else None


def readable(action: str) -> str:
    """A call as NAME JSON, an answer as its text. Any other action as it is."""
    if call := parse_call(action):
        return f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}"
    return str(parse_action(action)) if is_answer(action) else action


def is_answer(action: str) -> bool:
    """True for a message of a tool agent."""
    try:
        return isinstance(parse_action(action), str)
    except ValueError:
        return False


def tool_schemas(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """Function schemas in OpenAI's form, of LangChain's tools, functions, or any provider's schemas.

    A custom tool of OpenAI is a function of one text. Tools that run at the provider, such as a web search, are left out.
    Raises as LangChain does for an object that is no tool.
    """
    schemas = []
    for tool in tools:
        if isinstance(tool, Mapping) and "name" in tool and "parameters" in tool:  # OpenAI's responses, or a bare function
            schemas.append(_function(tool))
            continue
        if not isinstance(tool, Mapping) or any(key in tool for key in _SCHEMAS):
            tool = convert_to_openai_tool(tool)
        if tool.get("type") == "custom":
            schemas.append(_function({**tool.get("custom", tool), "parameters": _FREE_TEXT}))
        elif tool.get("type") == "function":
            schemas.append(dict(tool))
    return schemas


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool}}


def tool_line(function: Mapping[str, Any]) -> str:
    """A tool's schema on one line, in a third of its tokens as JSON.

    For example `get_order(order_id, note?: {"type": "integer"}) Look up an order.`; the name alone without parameters. The
    schema of the answer (`returns`) follows `->`. Args: `function`, of a tool's schema in OpenAI's form.
    """
    parameters = function.get("parameters")
    if parameters is None:
        return str(function["name"])
    required = parameters.get("required", ())
    arguments = ", ".join(
        f"{name}{'' if name in required else '?'}{'' if schema == {'type': 'string'} else f': {_sorted(schema)}'}"
        for name, schema in parameters.get("properties", {}).items()
    )
    described = str(function.get("description", "")).split()
    defined = ["with", _sorted(parameters["$defs"])] if "$defs" in parameters else []
    returns = ["->", _sorted(function["returns"])] if "returns" in function else []
    return " ".join([f"{function['name']}({arguments})", *returns, *described, *defined])


def _sorted(schema: Any) -> str:
    return json.dumps(schema, sort_keys=True, ensure_ascii=False)
