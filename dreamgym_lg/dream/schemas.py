"""Tool schemas: refuses invalid arguments as LangChain does, and checks the form of answers."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any

from langchain_core.tools import BaseTool, Tool
from langgraph.prebuilt.tool_node import INVALID_TOOL_NAME_ERROR_TEMPLATE, TOOL_INVOCATION_ERROR_TEMPLATE, ToolInvocationError
from pydantic import ValidationError

from dreamgym_lg.actions import ToolCall, parse_call
from dreamgym_lg.dream.parts import Answer, Episode
from dreamgym_lg.tasks import is_tool_task, schemas
from dreamgym_lg.types import Task


class Schemas:
    """Refuses unknown tools and wrong arguments in the words of LangGraph's `ToolNode`.

    In a graph LangChain does so before it calls the dream; this part makes other callers (`fidelity`, `play`) see the same.

    Args: `tools`, the agent's own, which validate arguments. Without them, only tool names and required arguments are checked,
    by the task's schemas.
    """

    name, version = "schema", ""

    def __init__(self, tools: Sequence[BaseTool] = ()) -> None:
        # of a plain `Tool`, LangChain validates nothing, and the schema is that of its own method
        self._tools = {tool.name: tool for tool in tools if tool.args_schema or not isinstance(tool, Tool)}

    def respond(self, episode: Episode) -> Answer | None:
        if not is_tool_task(episode.task):
            return None
        if (call := parse_call(episode.action)) is None:
            return Answer("Error: this is neither a tool call nor a message.", valid=False)
        known, tools = {str(schema["name"]): schema for schema in schemas(episode.task)}, episode.task.tools or ()
        names = [tool if isinstance(tool, str) else tool["function"]["name"] for tool in tools]
        if call.name not in known and names != list(tools):  # bare names are only the tools that traces called, not all tools
            text = INVALID_TOOL_NAME_ERROR_TEMPLATE.format(requested_tool=call.name, available_tools=", ".join(names))
            return Answer(text, valid=False)
        if call.name in self._tools:
            return self._validated(call, self._tools[call.name])
        required = (known.get(call.name, {}).get("parameters") or {}).get("required", ())
        missing = [name for name in required if name not in call.arguments]
        if not missing:
            return None
        error = "\n".join(f"{name}: Field required" for name in missing)
        template, arguments = TOOL_INVOCATION_ERROR_TEMPLATE, dict(call.arguments)
        return Answer(template.format(tool_name=call.name, tool_kwargs=arguments, error=error), valid=False)

    def _validated(self, call: ToolCall, tool: BaseTool) -> Answer | None:
        schema = tool.tool_call_schema  # without injected arguments
        try:
            if isinstance(schema, type):
                schema(**call.arguments)
        except ValidationError as error:
            refusal = ToolInvocationError(call.name, error, dict(call.arguments), error.errors())
            return Answer(refusal.message, valid=False)
        return None


# --- answers -----------------------------------------------------------------------------------------------------------

_TYPES = dict[str, Any](object=dict, array=list, string=str, integer=int, number=(int, float), boolean=bool, null=NoneType)


STATE_UPDATE = "State update"
"""Title of the schema of a tool that returns a `Command`: the state that it sets."""


def sets_state(task: Task, action: str) -> bool:
    """True if the tool's answer updates the graph's state. Traces hold only its message."""
    schema = returns_schema(task, action)
    return schema is not None and schema.get("title") == STATE_UPDATE


def returns_schema(task: Task, action: str) -> Mapping[str, Any] | None:
    """The schema of the called tool's return value. None for a tool without one, and for other actions."""
    call = parse_call(action)
    return next((f.get("returns") for f in schemas(task) if call is not None and f["name"] == call.name), None)


def fits_returns(task: Task, action: str, answer: Answer) -> bool:
    """True if an answer, as JSON or as plain text, fits the tool's return schema.

    Only types, items, required keys, `enum` and `const` are checked. Error texts always fit.
    """
    schema = returns_schema(task, action)
    if schema is None or not answer.valid:
        return True
    values: list[Any] = [answer.observation]  # a text result has no quotes
    with suppress(ValueError, RecursionError):
        values.append(json.loads(answer.observation))
    return any(_fits(value, schema, schema) for value in values)


def _fits(value: Any, schema: Any, root: Mapping[str, Any]) -> bool:
    if not isinstance(schema, Mapping):  # true, or no schema
        return True
    if "$ref" in schema:
        return _fits(value, root.get("$defs", {}).get(schema["$ref"].rpartition("/")[2]), root)
    if "anyOf" in schema or "oneOf" in schema:
        return any(_fits(value, option, root) for option in schema.get("anyOf") or schema["oneOf"])
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if not isinstance(value, _TYPES.get(str(schema.get("type")), object)):
        return False
    if isinstance(value, list):
        return all(_fits(item, schema.get("items"), root) for item in value)
    if isinstance(value, dict):
        keys, others = schema.get("properties", {}), schema.get("additionalProperties")
        complete = all(key in value for key in schema.get("required", ()))
        return complete and all(_fits(item, keys.get(key, others), root) for key, item in value.items())
    return True
