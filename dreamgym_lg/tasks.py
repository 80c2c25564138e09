"""Functions that read a task: its agent's input, first observation, tools and seed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage, SystemMessage, convert_to_messages
from langchain_core.tools import BaseTool

from dreamgym_lg.actions import is_answer
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Step, Task, Trajectory


def first_observation(task: Task) -> str:
    """The first text of a dream of the task: its observation, else its instruction."""
    return task.observation or task.instruction


def agent_input(task: Task) -> dict[str, list[BaseMessage]]:
    """A graph's input for the task: its messages, else its instruction as the user's message."""
    messages = task.messages or [{"role": "user", "content": task.instruction}]
    return {"messages": convert_to_messages([dict(message) for message in messages])}


def reference_episode(task: Task) -> Trajectory:
    """The reference of a drawn task, as a dreamed success."""
    observation, steps = first_observation(task), list[Step]()
    for action, answer in task.drawn["steps"]:
        last = is_answer(action)
        rest: dict[str, Any] = {"reward": 1.0, "terminated": True} if last else {"decided_by": "compiled"}
        steps.append(Step(observation=observation, action=action, next_observation=answer, **rest))
        observation = answer
    return Trajectory(task=task, steps=steps, source="synthetic", success=True)


def rules(task: Task) -> str:
    """The texts of the system messages in the agent's input; "" without one."""
    return "\n\n".join(SystemMessage(content).text for content in _system(task.messages))


def described(task: Task) -> str:
    """The agent's rules and its instruction, as the experience model reads them."""
    return "\n\n".join(filter(None, (rules(task), task.instruction)))


def with_own_rules(task: Task, prompt: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The prompt without the task's system messages that repeat the agent's own.

    A trace of model calls holds the system message that `create_agent` puts before its state. Run on the task's messages, the
    agent puts it there a second time. Any other prompt is left as it is.
    """
    recorded, prompt = _system(task.messages), list(prompt)
    system = [message.content for message in takewhile(lambda message: isinstance(message, SystemMessage), prompt)]
    added = len(system) - len(recorded)
    if added <= 0 or system[added:] != recorded:
        return prompt
    return [*prompt[:added], *prompt[added + min(added, len(recorded)) :]]


def _system(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [message["content"] for message in takewhile(lambda message: message["role"] == "system", messages)]


def is_tool_task(task: Task) -> bool:
    """True for the task of an agent with tools."""
    return task.tools is not None


def schemas(task: Task) -> list[Mapping[str, Any]]:
    """The functions that the agent can call, sorted by name."""
    functions = [{"name": tool} if isinstance(tool, str) else tool["function"] for tool in task.tools or ()]
    return sorted(functions, key=lambda function: str(function["name"]))


def argument_schemas(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a function's arguments, by name. Empty if `parameters` is malformed."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def with_tools(task: Task, offered: Sequence[Mapping[str, Any]]) -> Task:
    """Add the tools that the agent was offered to the task.

    A tool that the task has already gets only the schema of its answer (`returns`), which no trace holds.

    Args: `offered`, function schemas in OpenAI's form.
    """
    own = [tool for tool in task.tools or () if not isinstance(tool, str)]
    returns = {f["name"]: {"returns": f["returns"]} for f in (tool["function"] for tool in offered) if "returns" in f}
    own = [{**tool, "function": tool["function"] | returns.get(tool["function"]["name"], {})} for tool in own]
    names = {tool["function"]["name"] for tool in own}
    added = [tool for tool in offered if tool["function"]["name"] not in names]
    return replace(task, tools=[*own, *added])


def world_seed(task: Task) -> int:
    """The seed of what a task leaves open: its `seed`, else its hashed id."""
    return task.seed if task.seed is not None else int.from_bytes(blake2b(task.id.encode(), digest_size=4).digest())


class ToolUse(NamedTuple):
    """Tells if a tool changes the world, and the reason to think so."""

    writes: bool
    why: str


UNKNOWN = ToolUse(True, "nothing says that it only reads")
"""The use of an unknown tool: writing. A writing tool mistaken for a reading one would let a dream reward undone work."""


def find_tool_uses(
    tools: Iterable[BaseTool] = (),
    called: Iterable[str] = (),
    *,
    writes: Collection[str] | None = None,
    pass_through: Collection[str] = (),
) -> dict[str, ToolUse]:
    """The use of each tool, by name: as `writes` or its metadata say, else `UNKNOWN`.

    Args:
        tools: The agent's. Their metadata `writes` counts, and MCP's `readOnlyHint`, which langchain-mcp-adapters puts there.
        called: Names of further tools that traces call.
        writes: Names of all tools that write. None: metadata decide.
        pass_through: Names of tools that really run in a dream, which sees none of their calls.

    Raises `ConfigurationError` for a name in `writes` that no tool has, or a tool that really runs: nobody would judge it.
    """
    for name in sorted(set(writes or ()) & set(pass_through)):
        raise ConfigurationError(
            f"tool {name!r} in writes really runs in a dream, as it changes the graph's state alone, runs an agent, or is in "
            "pass_through: no judge sees its calls. Leave it out; verify_dream= can look at the state in which a graph ends"
        )
    metadata = {tool.name: tool.metadata or {} for tool in tools}
    names = sorted({*metadata, *called})
    for name in sorted(set(writes or ()) - set(names)):
        raise ConfigurationError.unknown("tool in writes", name, names)
    return {name: _tool_use(name, metadata.get(name, {}), writes) for name in names}


def _tool_use(name: str, metadata: Mapping[str, Any], writes: Collection[str] | None) -> ToolUse:
    if writes is not None:
        return ToolUse(name in writes, f"writes= {'names' if name in writes else 'does not name'} it")
    for key, means_writing in (("writes", True), ("readOnlyHint", False)):
        if isinstance(value := metadata.get(key), bool):
            return ToolUse(value is means_writing, f"its metadata says {key}={value}")
    return UNKNOWN
