"""Examines an agent for `dreamgym doctor`: finds its parts, and how a dream handles each."""

import io
import json
import sqlite3
import subprocess
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from langchain_core.caches import BaseCache
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.runnables import RunnableBinding
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.pregel import Pregel
from langgraph.types import interrupt

from dreamgym_lg.actions import parse_call, tool_schemas
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.episode import NO_CHECKPOINTER, check_names
from dreamgym_lg.simulate.object_graph import (
    body,
    code_names,
    function_references,
    makes_tools,
    reachable,
    references,
    run_by,
    runs_in_dream,
)
from dreamgym_lg.simulate.return_types import UNKNOWN_UPDATE, returns_command, state_update
from dreamgym_lg.simulate.wall.wall import Isolation
from dreamgym_lg.tasks import UNKNOWN, ToolUse, find_tool_uses
from dreamgym_lg.types import Trajectory
from dreamgym_lg.user_code import users

Handling = Literal["simulated", "passes through", "replaced", "answered", "raised", "stopped", "could leak", "not simulated"]
"""How a dream handles a part. `passes through`: it runs, but its real accesses are stopped. `stopped`: it makes a real access,
so that its episode fails. `raised`: its own error ended the trial episode. `could leak`: the guard would not see its real
access. `not simulated`: it runs, or fails, where policy or environment should answer."""

_PROBLEMS = ("stopped", "could leak", "not simulated")
_NEEDED = ("client", "sub-graph", "backend", "middleware")
"""Kinds of parts that every episode needs."""


class Part(NamedTuple):
    """One part of an agent, and how a dream handles it."""

    kind: str
    name: str
    handling: Handling
    advice: str = ""
    """What to do; "" for nothing."""
    use: str = ""
    """Of a simulated tool: if it reads or writes, and how that is known."""


@dataclass(frozen=True)
class Examination:
    """The parts of an agent. `problems` are those that cannot be simulated unchanged."""

    parts: Sequence[Part] = field(default_factory=list)
    tools: Sequence[BaseTool] = ()
    """The agent's tools and those of its sub-agents, but for tools that are created while it runs."""

    @property
    def problems(self) -> list[Part]:
        return [part for part in self.parts if part.handling in _PROBLEMS]

    @property
    def refused(self) -> list[Part]:
        """The problems that spoil every episode: leaks, parts not simulated, needed parts that are stopped."""
        return [part for part in self.problems if part.handling != "stopped" or part.kind in _NEEDED]

    @property
    def writes_line(self) -> str:
        """Advice with a `writes=[...]` to paste, if it is unknown which tools write; else ""."""
        unknown = [each.name for each in self.parts if each.use == _COUNTS_AS_WRITING]
        if not unknown:
            return ""
        writing = sorted(each.name for each in self.parts if each.use and not each.use.startswith("reads"))
        return (
            f"Nothing tells if these only read: {', '.join(unknown)}. Leave those out that do, and give the others as --writes "
            f"NAME, in code as\nwrites={json.dumps(writing)}"
        )

    def __str__(self) -> str:
        """A line for each part (kind, name, handling, use, advice), then `writes_line`."""
        lines = ((f"{part.kind} {part.name}: {part.handling}", part.use, part.advice) for part in self.parts)
        return "\n".join(filter(None, [*("; ".join(filter(None, line)) for line in lines), self.writes_line]))


def examine(
    graph: Any,
    *,
    pass_through: Sequence[str] = (),
    simulate_nodes: Sequence[str] = (),
    writes: Collection[str] | None = None,
    trajectories: Iterable[Trajectory] = (),
    isolation: Isolation = "guard",
) -> Examination:
    """Find an agent's models, tools, graphs, stores and plain code, without running anything.

    Args: `writes`, names of the tools that write, as of `find_tool_uses`; `trajectories`, real ones, which show further tools;
    `isolation`, of its dreams: the wall (`process`) also stops what could leak past the guard.

    Raises `ConfigurationError` if `graph` contains no graph, for unknown names of nodes or tools, and if a tool in `writes`
    really runs in a dream.
    """
    objects = list(reachable(graph))
    graphs = [each for each in objects if isinstance(each, Pregel)]
    if not graphs:
        raise ConfigurationError(
            f"{type(graph).__name__} holds no compiled graph; give what StateGraph.compile or create_agent returns"
        )
    nodes = {name for each in graphs for name in each.nodes}
    if unknown := set(simulate_nodes) - nodes:
        raise ConfigurationError.unknown("node", sorted(unknown)[0], nodes - {"__start__"})
    check_names(graph, pass_through=pass_through)
    tools = {tool.name: tool for tool in objects if isinstance(tool, BaseTool)}
    calls = (parse_call(step.action) for each in trajectories for step in each.steps if step.valid)
    called = {call.name for call in calls if call is not None}
    running = {name for name, tool in tools.items() if name in pass_through or runs_in_dream(tool)}
    uses = find_tool_uses(tools.values(), called, writes=writes, pass_through=running)
    parts = [part for each in objects for part in _object_parts(each)]
    for name, tool in tools.items():
        parts += _tool_parts(tool, pass_through, uses[name])
    parts += _graph_parts(graphs)
    bodies = {id(body(tool)): name for name, tool in tools.items() if name not in running}
    by_name = _bound_names(objects) - tools.keys() - set(pass_through)
    for place, roots in _places(graph, graphs, simulate_nodes):
        parts += [Part("node", place, "simulated")] if roots is None else _plain_code(place, roots, bodies, by_name)
    if isinstance(get_llm_cache(), BaseCache):
        parts.append(Part("cache", "the global LLM cache", "replaced"))
    parts = list(map(_behind_wall, parts)) if isolation == "process" else parts
    return Examination(list(dict.fromkeys(parts)), list(tools.values()))


def _behind_wall(part: Part) -> Part:
    """The part as the wall handles it, which stops what could leak past the guard."""
    return part._replace(handling="stopped", advice=part.advice.partition(": ")[2]) if part.handling == "could leak" else part


_VIRTUAL_BACKENDS = ("StateBackend", "StoreBackend", "CompositeBackend")
"""Backends of deepagents that keep files in the graph's state or store, for file tools that really run."""


def _object_parts(each: Any) -> Iterator[Part]:
    """The part that an object is, wherever the agent holds it."""
    module, name = type(each).__module__, type(each).__name__
    if isinstance(each, BaseChatModel):
        yield Part("model", f"{name} {each._get_ls_params().get('ls_model_name') or ''}".strip(), "simulated")
    elif name == "OpenAIModerationMiddleware":
        advice = "it asks OpenAI around each model call: allow that host, or build the agent without it to train it"
        yield Part("middleware", name, "stopped", advice)
    elif module.startswith("deepagents.backends") and name.endswith(("Backend", "Sandbox")) and name not in _VIRTUAL_BACKENDS:
        yield Part("backend", name, "stopped", "its files are real: build the agent with StateBackend to train it")


_COUNTS_AS_WRITING = "unknown: counts as writing"


def _tool_parts(tool: BaseTool, pass_through: Sequence[str], use: ToolUse) -> Iterator[Part]:
    kind = "" if tool.name in pass_through else runs_in_dream(tool)
    if kind or tool.name in pass_through:
        yield Part("tool", f"{tool.name} ({kind})" if kind else tool.name, "passes through")
        root = body(tool)
        root = types.MethodType(root, tool) if root is type(tool)._run else root
        yield from (part for part in _plain_code(f"tool {tool.name}", [root], {}) if part.handling != "passes through")
        return
    use_text = _COUNTS_AS_WRITING if use == UNKNOWN else f"{'writes' if use.writes else 'reads'}: {use.why}"
    update = state_update(tool) if returns_command(tool) else None
    if returns_command(tool) and update is None:
        yield Part("tool", tool.name, "not simulated", UNKNOWN_UPDATE, use_text)
        return
    keys = ", ".join(update.answered) if update is not None else ""
    yield Part("tool", tool.name, "simulated", keys and f"the dream also answers the state that it writes: {keys}", use_text)


def _graph_parts(graphs: Sequence[Pregel]) -> Iterator[Part]:
    goes_on = isinstance(graphs[0].checkpointer, BaseCheckpointSaver)
    for i, each in enumerate(graphs):
        name = each.get_name()
        if i:
            yield Part("sub-graph", name, "simulated")
        for kind in ("cache", "checkpointer", "store"):
            if (kept := getattr(each, kind)) is not None and not isinstance(kept, bool):
                yield Part(kind, f"{type(kept).__name__} of {name}", "replaced")
        for when in ("before", "after"):
            if nodes := getattr(each, f"interrupt_{when}_nodes", ()):
                name = f"{when} {nodes if isinstance(nodes, str) else ', '.join(nodes)}"
                yield Part("interrupt", name, *(("answered",) if goes_on else ("not simulated", NO_CHECKPOINTER)))


def _places(graph: Any, graphs: Sequence[Pregel], simulated: Sequence[str]) -> Iterator[tuple[str, list[Any] | None]]:
    """(place, objects called there) of plain code. None: the environment answers the node."""
    for each in graphs:
        for name, node in each.nodes.items():
            place = f"{name} of {each.get_name()}" if len(graphs) > 1 else name
            yield place, None if name in simulated else [node.bound, *node.writers]
    if not isinstance(graph, Pregel):
        called = [getattr(graph, name, None) for name in ("invoke", "ainvoke")]
        yield f"{type(graph).__name__}.invoke", [each for each in called if each is not None]


def _bound_names(objects: Iterable[Any]) -> set[str]:
    """Names of tools bound to models, and of functions listed in code with `bind_tools`."""
    names = set[str]()
    for each in objects:
        if isinstance(each, RunnableBinding):
            names |= {schema["function"]["name"] for schema in tool_schemas(each.kwargs.get("tools") or ())}
        elif users(each) and "bind_tools" in code_names(each):
            names |= {function.__name__ for function in _functions_in_lists(each)}
    return names


def _functions_in_lists(function: types.FunctionType) -> list[types.FunctionType]:
    """The user's functions in lists, tuples and dictionaries that a function refers to."""
    containers = [each for each in function_references(function) if isinstance(each, list | tuple | dict)]
    return [each for container in containers for each in references(container) if users(each)]


def _plain_code(place: str, roots: Sequence[Any], bodies: dict[int, str], by_name: Collection[str] = ()) -> Iterator[Part]:
    """The parts of plain code, which really runs.

    Args: `bodies`, id of a simulated tool's function -> tool name; `by_name`, names that models may call without such a tool.
    """
    objects = list(run_by(roots))
    functions = [each for each in objects if users(each)]
    problems = [part for each in objects for part in _unseen_access(each, place)]
    for each in objects:
        if name := bodies.get(id(each)):
            advice = f"it holds the function of tool {name}, which really runs there: call the tool's invoke or ainvoke"
            problems.append(Part("node", place, "not simulated", advice))
    for function in functions:
        problems += _unseen_calls(function, place)
        if "bind_tools" not in code_names(function):
            called = (*filter(users, function_references(function)), *_functions_in_lists(function))
            names = dict.fromkeys(each.__name__ for each in called if each.__name__ in by_name)
            problems += [Part("tool", name, "not simulated", f"{place} {_BY_NAME}") for name in names]
        if any(each is interrupt for each in function_references(function)):
            yield Part("interrupt", place, "answered", _INTERRUPT)
        if makes_tools(function):
            yield Part("tool", f"made in {place}", "simulated")
    yield from problems or [Part("code", place, "passes through")] * bool(functions)


_BY_NAME = "calls it as a plain function, which really runs: make it a @tool and call its invoke or ainvoke"
_INTERRUPT = (
    "by respond=; without it LangChain's requests to approve tool calls are approved, a user hears any other, and without one "
    "the answer is yes"
)
_DRIVERS_IN_C = ("psycopg", "psycopg2", "duckdb", "_duckdb", "grpc", "pycurl")
_CONNECTING = {"connect", "Connection", "AsyncConnection", "ConnectionPool", "Curl", "CurlMulti"}
"""Names in code that opens a connection of psycopg, psycopg2 or pycurl."""
_POOLS = ("Engine", "AsyncEngine", "Connection", "Session", "scoped_session", "sessionmaker")


def _unseen_access(each: Any, place: str) -> Iterator[Part]:
    """The problem of an object that neither patches nor guard control."""
    name, package = type(each).__name__, type(each).__module__.partition(".")[0]
    here = f"{package}.{name} in {place}"
    if isinstance(each, BaseLLM):
        advice = "a text-completion model has no messages, so that no policy answers for it: use its chat-model class"
        yield Part("model", here, "not simulated", advice)
    elif package in ("openai", "anthropic") and hasattr(each, "base_url"):
        yield Part("client", here, "stopped", "call the model through its LangChain class")
    elif name == "RemoteGraph" and package == "langgraph":
        yield Part("sub-graph", here, "stopped", "it runs on a server: use the graph itself instead")
    elif kind := _open_kind(each, package):
        named_file = f"{getattr(each, 'name', name)} open in {place}"
        advice = f"no guard sees what is written to an open {kind}: {_fix(place)}"
        yield Part(kind, named_file if kind == "file" else here, "could leak", advice)


def _fix(place: str) -> str:
    return "let it be simulated" if place.startswith("tool ") else "move it into a tool, or name the node in simulate_nodes"


def _open_kind(each: Any, package: str) -> str:
    """Kind of an open resource that reaches reality without an audit event; else ""."""
    if isinstance(each, io.IOBase):
        if each is sys.stdout or each is sys.stderr or each.closed or not each.writable():
            return ""
        with suppress(OSError):  # no descriptor: it is in memory
            return "file" if each.fileno() >= 0 else ""
    if isinstance(each, sqlite3.Connection):
        try:
            return "connection" if any(file for _, _, file in each.execute("PRAGMA database_list")) else ""
        except sqlite3.ProgrammingError as error:  # closed, or of another thread
            return "" if "closed" in str(error) else "connection"
    if isinstance(each, subprocess.Popen) and each.stdin is not None:
        return "process"
    is_session = (package == "mcp" and type(each).__name__ == "ClientSession") or package in _DRIVERS_IN_C
    return "connection" if is_session or (package == "sqlalchemy" and type(each).__name__ in _POOLS) else ""


def _unseen_calls(function: types.FunctionType, place: str) -> Iterator[Part]:
    """Problems of code that calls a tool's function directly, or connects by native code."""
    names, referred = code_names(function), list(function_references(function))
    modules = {str(getattr(each, "__name__" if isinstance(each, types.ModuleType) else "__module__", "")) for each in referred}
    packages = {each.partition(".")[0] for each in modules | names} & {"psycopg", "psycopg2", "pycurl"}
    for package in sorted(packages if names & _CONNECTING else ()):
        yield Part("connection", f"{package} in {place}", "could leak", f"no guard sees compiled code connect: {_fix(place)}")
    referred += [part for each in referred if isinstance(each, list | tuple | dict) for part in references(each)]
    for name in sorted(names & {"func", "coroutine"} if any(isinstance(each, BaseTool) for each in referred) else ()):
        call = "await tool.ainvoke(...)" if name == "coroutine" else "tool.invoke(...)"
        advice = f"it calls tool.{name}(...), which really runs the tool's own code: use {call}"
        yield Part("node", place, "not simulated", advice)
