"""Plays one trial episode: each tool is called once and returns a minimal value."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.tool import tool_call
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import PrivateAttr

from dreamgym_lg.actions import parse_call
from dreamgym_lg.environment import Environment, EpisodeContext
from dreamgym_lg.errors import AccessBlocked, ConfigurationError
from dreamgym_lg.rollout import Agent
from dreamgym_lg.simulate.doctor import Part
from dreamgym_lg.types import Act, StepResult, Task


async def try_out(agent: Agent) -> tuple[list[Part], dict[str, str]]:
    """Play one trial episode of an agent with a `TrialPolicy`. Returns its problems and its system prompts by node.

    Each tool is called once and returns a minimal value of its type. Code that this does not reach is not checked. Raises
    `ConfigurationError` if the agent cannot be loaded.
    """
    acts, prompts, error = list[Act](), dict[str, str](), None
    context = EpisodeContext(environment=_TrialEnvironment())
    try:
        async for state in agent.astream({"task": _TASK}, None, context=context, stream_mode="values"):
            acts, prompts = state.get("acts", acts), state.get("prompts", prompts)
    except ConfigurationError:
        raise
    except Exception as failure:
        error = failure
    problems = [Part("code", act.line, "stopped", f"{act.text}: {_FIX}") for act in acts if act.kind == "blocked"]
    if isinstance(error, AccessBlocked) and not problems:
        problems = [Part("code", "the tried episode", "stopped", str(error))]
    elif error is not None and not problems:
        raising = next((act for act in acts if act.kind == "raised"), None)
        place, text = (raising.line or "the tried episode", raising.text) if raising else ("the tried episode", str(error))
        problems = [Part("code", place, "raised", f"{text}; the agent was given a message alone, and tools that say nothing")]
    return problems, prompts


_TASK = Task(id="doctor", instruction="Help me.", environment="doctor")
_FIX = "move it into a tool, allow its hosts and paths, or name the node in simulate_nodes"


class TrialPolicy(BaseChatModel):
    """Calls each tool once, then gives a final answer."""

    _called: set[str] = PrivateAttr(default_factory=set)

    @property
    def _llm_type(self) -> str:
        return "dreamgym-trial"

    def _generate(self, messages: list[BaseMessage], *_: Any, **kwargs: Any) -> ChatResult:
        schema = kwargs.get("response_format", {}).get("json_schema", {}).get("schema")
        message = AIMessage("done" if schema is None else json.dumps(example(schema)))
        functions = {each["function"]["name"]: each["function"] for each in kwargs.get("tools", ())}
        forced = [kwargs["tool_choice"]] if kwargs.get("tool_choice") in functions else []
        if name := next(iter([*forced, *(each for each in functions if each not in self._called)]), None):
            self._called.add(name)
            arguments = example(functions[name].get("parameters") or {"type": "object"})
            message.tool_calls = [tool_call(name=name, args=arguments, id=f"call-{len(messages)}")]
        return ChatResult(generations=[ChatGeneration(message=message)])


class _TrialEnvironment(Environment):
    """Answers each call with a minimal value of the tool's return type."""

    def reset(self, task: Task) -> str:
        self._returns = dict[str, Any]()
        return task.instruction

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._returns = {each["function"]["name"]: each["function"].get("returns") for each in tools}

    def step(self, action: str) -> StepResult:
        if (call := parse_call(action)) is None:
            return StepResult("", 0.0, True, False, {})
        schema = {"type": "object"} if call.name.startswith("node:") else self._returns.get(call.name)
        return StepResult("ok" if schema is None else json.dumps(example(schema)), 0.0, False, False, {})


def example(schema: Mapping[str, Any], definitions: Mapping[str, Any] | None = None, within: Sequence[str] = ()) -> Any:
    """A minimal value of a JSON schema. Args: `within`, the enclosing definitions, where recursion ends."""
    definitions = definitions or schema.get("$defs", {})
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return {} if name in within else example(definitions[name], definitions, (*within, name))
    for key in ("default", "const", "enum", "examples"):
        if key in schema:
            return schema[key][0] if key in ("enum", "examples") else schema[key]
    if "allOf" in schema:
        return example({name: value for part in schema["allOf"] for name, value in part.items()}, definitions, within)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        others = [each for each in options if each.get("$ref", "").rpartition("/")[2] not in within]
        return example((others or options)[0], definitions, within)
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "object":
        fields = schema.get("properties", {})
        return {name: example(fields[name], definitions, within) for name in schema.get("required", ())}
    if kind == "array":
        return [example(schema.get("items", {}), definitions, within) for _ in range(schema.get("minItems", 0))]
    numbers = {"integer": schema.get("minimum", 1), "number": schema.get("minimum", 1.0)}
    return {**numbers, "boolean": True, "null": None}.get(kind, "example")
