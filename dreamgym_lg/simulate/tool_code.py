"""Reads off a tool's code if it calls an agent, changes state, or acts."""

import ast
import datetime
import dis
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.runnables import RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import BaseTool
from langgraph.constants import END
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore
from langgraph.types import Command
from pydantic import BaseModel

from dreamgym_lg.simulate.object_graph import body, codes, function_references, named_values, reachable


def runs_in_dream(tool: BaseTool) -> str:
    """ "a sub-agent" or "state only", if the tool runs in a dream too; else ""."""
    return "a sub-agent" if runs_an_agent(tool) else "state only" if changes_state_only(tool) else ""


def simulated_tools(graph: Any, pass_through: Sequence[str] = ()) -> tuple[list[BaseTool], list[str]]:
    """The tools of an agent that a dream plays; the names of the others."""
    tools = {tool.name: tool for tool in reachable(graph) if isinstance(tool, BaseTool)}
    running = [name for name, tool in tools.items() if name in pass_through or runs_in_dream(tool)]
    return [tool for name, tool in tools.items() if name not in running], running


# --- sub-agents -------------------------------------------------------------------------------------------------------------

_RUNS = {"invoke", "ainvoke", "stream", "astream", "batch", "abatch", "stream_events", "astream_events"}


def runs_an_agent(tool: BaseTool) -> bool:
    """Tells if the tool's body calls a graph, whose own tools are then simulated.

    The code must name both the graph and a way to run it: an object that merely holds one, as an application does, makes no
    tool a sub-agent. What is not seen here is simulated, so that nothing real runs by mistake.
    """
    function = inspect.unwrap(body(tool))
    if isinstance(function, types.MethodType):  # a tool made of `graph.invoke`
        return _runs_graph(function.__self__)
    if not isinstance(function, types.FunctionType):
        return False
    if function.__module__ == "langchain_core.tools.convert":  # `Runnable.as_tool`
        return any(map(_runs_graph, function_references(function)))
    names = {name for code in codes(function) for name in code.co_names}
    return bool(names & _RUNS) and any(_leads_to_graph(value, names) for value in (*function_references(function), tool))


def _runs_graph(runnable: Any) -> bool:
    """Tells if it is a graph, or a chain or binding of one."""
    if isinstance(runnable, RunnableBindingBase):
        return _runs_graph(runnable.bound)
    if isinstance(runnable, RunnableSequence):
        return any(map(_runs_graph, runnable.steps))
    return isinstance(runnable, Pregel)


def _leads_to_graph(value: Any, names: set[str]) -> bool:
    if isinstance(value, Pregel):
        return True
    if isinstance(value, Mapping):
        return any(isinstance(each, Pregel) for each in value.values())
    fields = vars(value) if hasattr(value, "__dict__") and not isinstance(value, types.FunctionType) else {}
    return any(isinstance(fields.get(name), Pregel) for name in names & fields.keys())


# --- tools of the graph's state ---------------------------------------------------------------------------------------------

_STATE_TOOLS = ("deepagents.", "langchain.agents.middleware.todo")
"""Modules whose tools do nothing but change the graph's state."""

_HARMLESS = {
    *("langchain", "langchain_core", "langgraph", "langgraph_supervisor", "langgraph_swarm"),
    *("builtins", "typing", "types", "json", "re", "math", "uuid", "datetime", "time", "enum", "operator"),
}
"""Packages whose functions and classes touch nothing outside of the process by themselves."""

_ACTING = {"open", "input", "print", "exec", "eval", "compile", "__import__", "setattr", "context", "config"}
"""Names by which a function may act all the same: a run's context and config hold whatever the user put there."""

_METHODS = {
    *(name for kind in (str, list, dict, set, int, float, datetime.datetime, re.Pattern, re.Match) for name in dir(kind)),
    *(name for kind in (BaseModel, ToolMessage, AIMessage, BaseStore) for name in dir(kind)),
}
"""Of values: they touch nothing outside of the process."""

_ATTR_SAYS_METHOD = sys.version_info >= (3, 12)


def changes_state_only(tool: BaseTool) -> bool:
    """Tells if a tool only changes the graph's state or hands over to another node.

    So do LangChain's and deepagents' own, those of langgraph-supervisor and langgraph-swarm, and every function that makes a
    `Command` of nothing but its arguments. What refers to anything else is simulated: it may act on the world.
    """
    function = body(tool)
    if str(getattr(function, "__module__", "")).startswith(_STATE_TOOLS):
        return True
    if function is type(tool)._run or not isinstance(function, types.FunctionType):
        return False
    return any(value is Command for value in named_values(function)) and _is_harmless(function)


def _is_harmless(value: Any, seen: tuple[Any, ...] = ()) -> bool:
    """Tells if a value is a constant, of a harmless package, or a function of such."""
    if isinstance(value, tuple | frozenset):
        return all(_is_harmless(each, seen) for each in value)
    if isinstance(value, str | bytes | int | float | bool | type(None)):
        return True
    if isinstance(value, types.ModuleType):
        return _of_harmless_package(value)
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return type(value).__module__ in ("typing", "re", "datetime", "uuid")
    if _of_harmless_package(value):
        return True
    if isinstance(value, types.FunctionType):
        return any(value is each for each in seen) or _is_harmless_function(value, seen)
    return isinstance(value, type) and issubclass(value, BaseModel | Enum | dict)


def _is_harmless_function(function: types.FunctionType, seen: tuple[Any, ...]) -> bool:
    names, methods = set[str](), set[str]()
    for code in codes(function):
        names.update(code.co_names, code.co_varnames)
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_NAME" and str(step.argval).partition(".")[0] not in _HARMLESS:
                return False
            if step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and _ATTR_SAYS_METHOD and (step.arg or 0) & 1):
                methods.add(str(step.argval))
    values = list(named_values(function))
    libraries = [each for each in values if isinstance(each, type | types.ModuleType) and _of_harmless_package(each)]
    offered = {name for each in libraries for name in dir(each)}
    if names & _ACTING or not methods <= _METHODS | offered:  # of what the state or a run's config holds, a client perhaps
        return False
    return all(_is_harmless(each, (*seen, function)) for each in values)


def _of_harmless_package(value: Any) -> bool:
    """Tells if a module, class or function is one of `_HARMLESS`."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(name).partition(".")[0] in _HARMLESS


# --- what its Command writes --------------------------------------------------------------------------------------------------

MESSAGES = "messages"


class StateUpdate(NamedTuple):
    """The effect of a tool's `Command` on the graph that calls it."""

    answered: Mapping[str, bool]
    """The keys whose values the world answers; False: some of the tool's Commands do not write it."""
    computed: Mapping[str, types.CodeType]
    """The keys whose values follow from the call's arguments alone."""
    has_message: bool
    """It writes a message, the tool's answer."""
    goto: str | tuple[()]
    graph: str | None

    def values(self, function: types.FunctionType, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The computed values of one call. Args: `arguments`, by name."""
        parameters = inspect.signature(function).parameters.values()
        names = {each.name: each.default for each in parameters if each.default is not each.empty} | dict(arguments)
        return {key: eval(code, {"__builtins__": {}}, names) for key, code in self.computed.items()}


def returns(tool: BaseTool) -> Any:
    """The type that a tool's body promises, `Command` for `Command[...]`; or None."""
    try:
        kind = typing.get_type_hints(inspect.unwrap(body(tool))).get("return")
    except Exception:  # a name that exists for type checkers only
        return None
    return Command if typing.get_origin(kind) is Command else kind


def returns_command(tool: BaseTool) -> bool:
    """Tells if a tool returns, or makes, a `Command`."""
    kinds = [returns(tool), *typing.get_args(returns(tool))]
    if any(kind is Command or typing.get_origin(kind) is Command for kind in kinds):
        return True
    function = inspect.unwrap(body(tool))
    return isinstance(function, types.FunctionType) and any(
        "Command" in (*code.co_names, *code.co_freevars, *code.co_varnames) for code in codes(function)
    )


def state_update(tool: BaseTool) -> StateUpdate | None:
    """The effect of a tool's Commands; None if its code does not show it."""
    function = inspect.unwrap(body(tool))
    return _read(function) if isinstance(function, types.FunctionType) else None


@lru_cache(500)
def _read(function: types.FunctionType) -> StateUpdate | None:
    try:
        tree = _parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # no file: typed into an interpreter
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == "Command"]
    commands = [command for call in calls if (command := _read_command(call)) is not None]
    if not commands or len(commands) < len(calls) or len({(each.goto, each.graph) for each in commands}) > 1:
        return None
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    unchanged = set(inspect.signature(function).parameters) - stored
    answered, computed = dict[str, bool](), dict[str, types.CodeType]()
    for key in dict.fromkeys(key for each in commands for key in each.update if key != MESSAGES):
        values = [each.update[key] for each in commands if key in each.update]
        in_all = len(values) == len(commands)
        if in_all and len(set(map(ast.dump, values))) == 1 and _follows(values[0], unchanged):
            computed[key] = compile(ast.Expression(values[0]), f"<{key} of {function.__name__}>", "eval")
        else:
            answered[key] = in_all
    has_message = any(MESSAGES in each.update for each in commands)
    return StateUpdate(answered, computed, has_message, commands[0].goto, commands[0].graph)


def _parse(source: str) -> ast.Module:
    """`ast.parse`, again where another thread disturbed it, as before Python 3.12."""
    for _ in range(20):  # "AST constructor recursion depth mismatch", https://github.com/python/cpython/issues/106905
        with suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


class _Command(NamedTuple):
    """One `Command(...)` of the code."""

    update: Mapping[str, ast.expr]
    goto: str | tuple[()]
    graph: str | None


def _read_command(call: ast.Call) -> _Command | None:
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    update = arguments.pop("update", ast.Dict([], []))
    goto, graph = arguments.pop("goto", None), arguments.pop("graph", None)
    if arguments or call.args or not isinstance(update, ast.Dict) or (graph is not None and _name(graph) != "PARENT"):
        return None
    keys = [key.value for key in update.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    target: Any = ()
    if goto is not None:
        target = goto.value if isinstance(goto, ast.Constant) else END if _name(goto) == "END" else None
    if len(keys) < len(update.keys) or not isinstance(target, str | tuple):
        return None
    return _Command(dict(zip(keys, update.values, strict=True)), target, Command.PARENT if graph is not None else None)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


_CONSTRUCTIONS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.JoinedStr, ast.FormattedValue, ast.Load)


def _follows(value: ast.expr, unchanged: set[str]) -> bool:
    """Tells if a value is made of constants and arguments alone. Args: `unchanged`, arguments that the code does not set."""
    return all(
        isinstance(node, _CONSTRUCTIONS) or (isinstance(node, ast.Name) and node.id in unchanged) for node in ast.walk(value)
    )
