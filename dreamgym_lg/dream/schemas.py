"""`Schemas`: the responder that refuses what LangChain itself would refuse."""

from collections.abc import Sequence

from langchain_core.tools import BaseTool
from langgraph.prebuilt.tool_node import (
    INVALID_TOOL_NAME_ERROR_TEMPLATE,
    TOOL_INVOCATION_ERROR_TEMPLATE,
    ToolInvocationError,
)
from pydantic import ValidationError

from dreamgym_lg.actions import ToolCall, parse_call
from dreamgym_lg.dream.parts import Answer, Episode
from dreamgym_lg.tasks import is_tool_task, schemas


class Schemas:
    """Refuses a call of an unknown tool or with wrong arguments, in the words of LangGraph's `ToolNode`.

    In a graph LangChain does so before any dream is asked; this part makes other callers (`fidelity`, `play`) see the same.

    Args: `tools`, the agent's own, which validate arguments. Without them the task's schemas are used: names of tools and
    required arguments.
    """

    name = "schema"

    def __init__(self, tools: Sequence[BaseTool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def respond(self, episode: Episode) -> Answer | None:
        if not is_tool_task(episode.task):
            return None
        if (call := parse_call(episode.action)) is None:
            return Answer("Error: this is neither a tool call nor a message.", valid=False)
        known, tools = {str(schema["name"]): schema for schema in schemas(episode.task)}, episode.task.tools or ()
        names = [tool if isinstance(tool, str) else tool["function"]["name"] for tool in tools]
        if call.name not in known and names != list(tools):  # names alone are those that traces called, and not all there are
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
        schema = tool.tool_call_schema  # without what the graph injects
        try:
            if isinstance(schema, type):
                schema(**call.arguments)
        except ValidationError as error:
            refusal = ToolInvocationError(call.name, error, dict(call.arguments), error.errors())
            return Answer(refusal.message, valid=False)
        return None
