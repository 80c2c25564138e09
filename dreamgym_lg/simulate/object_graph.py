"""Searches an agent's objects and code, and decides which tools really run in a dream."""

import contextlib
import dis
import functools
import inspect
import logging
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from enum import Enum
from multiprocessing.pool import ThreadPool
from typing import Any, cast, get_args, get_type_hints

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import BaseTool, tool
from langgraph.pregel import Pregel
from langgraph.types import Command
from pydantic import BaseModel

from dreamgym_lg.user_code import users, users_class

logger = logging.getLogger(__name__)

MAX_OBJECTS = 1_000_000
"""Most objects that a search visits. An agent's data may be in memory: each record counts."""

_PLAIN: frozenset[type] = frozenset({str, bytes, int, float, complex, bool, type(None)})
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_LEAVES = (*_PLAIN, BaseMessage, type, types.ModuleType)
_SEARCHED = ("langchain", "langgraph", "deepagents")
"""Packages whose objects are searched although they are not the user's: graphs, nodes, agents and tools."""


def reachable(root: Any) -> Iterator[Any]:
    """`root` and all objects that it refers to, directly or not, each once. Containers are searched, but not among them."""
    return _walk([root], references)


def _walk(roots: Iterable[Any], follow: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    seen: dict[Any, Any] = {}  # keeps objects alive: the id of a collected one is used again
    pending = list(roots)
    while pending:
        item = pending.pop()
        # each access to a bound method creates a new object
        key = (id(item.__self__), id(item.__func__)) if isinstance(item, types.MethodType) else id(item)
        if key in seen or isinstance(item, _LEAVES):
            continue
        if len(seen) >= MAX_OBJECTS:
            logger.warning(
                "the agent has more than %s objects: tools behind the others are not known; load its data from a file",
                f"{len(seen):,}",
            )
            return
        seen[key] = item
        if type(item) in _CONTAINERS:
            parts = item.values() if isinstance(item, dict) else item
        else:
            yield item
            parts = follow(item)
        pending.extend([part for part in parts if type(part) not in _PLAIN])


def references(item: Any) -> Iterator[Any]:
    """The objects that one directly refers to. A user's class also counts with its members."""
    if isinstance(item, types.FunctionType):
        yield from function_references(item)
    elif isinstance(item, types.MethodType):
        yield from (item.__self__, item.__func__)
    elif isinstance(item, functools.partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, functools._lru_cache_wrapper):
        yield item.__wrapped__
    elif isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, list | tuple | set | frozenset):
        yield from item
    elif type(item).__module__.startswith(_SEARCHED) or users_class(type(item)):
        if isinstance(item, BaseTool):  # its globals too if the agent is an installed package
            function = inspect.unwrap(body(item))
            yield from named_values(function) if isinstance(function, types.FunctionType) else ()
        for owner in filter(users_class, type(item).__mro__):
            yield from map(_unwrapped, vars(owner).values())
        yield from vars(item).values() if hasattr(item, "__dict__") else ()
        slots = [name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
        yield from (getattr(item, name) for name in slots if hasattr(item, name))


def _unwrapped(member: Any) -> Any:
    """The function of a property, static method or class method; any other member unchanged."""
    member = member.fget if isinstance(member, property) else member
    member = member.func if isinstance(member, functools.cached_property) else member
    return member.__func__ if isinstance(member, staticmethod | classmethod) else member


def function_references(function: types.FunctionType) -> Iterator[Any]:
    """A function's `named_values` and the function that it wraps; globals only for the user's code."""
    yield from named_values(function, globals=users(function))
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield wrapped


def named_values(function: types.FunctionType, *, globals: bool = True) -> Iterator[Any]:
    """A function's defaults, closure cells, and the globals that its code names, nested functions included."""
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    if globals:
        yield from (function.__globals__[name] for name in code_names(function) if name in function.__globals__)


def code_names(function: types.FunctionType) -> set[str]:
    """The names of globals and attributes in a function's code, nested functions included."""
    return {name for code in _codes(function) for name in code.co_names}


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """The function's code, and that of the functions and classes inside of it."""
    parts = [function.__code__]
    for code in parts:  # grows meanwhile
        yield code
        parts.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def body(tool: BaseTool) -> Any:
    """The function that a tool calls. Of a class whose `_run` only raises it is `_arun`."""
    run, arun = type(tool)._run, type(tool)._arun
    is_async = arun is not BaseTool._arun and "NotImplementedError" in inspect.unwrap(run).__code__.co_names
    return getattr(tool, "func", None) or getattr(tool, "coroutine", None) or (arun if is_async else run)


# --- what runs --------------------------------------------------------------------------------------------------------------

_ANSWERED = (BaseTool, BaseChatModel, Pregel)
"""Classes that an episode answers for or replaces, so that `run_by` does not enter them.

Not stores, checkpointers and caches: an episode replaces those of a graph, but not those that code holds by itself.
"""


def run_by(roots: Iterable[Any]) -> Iterator[Any]:
    """The functions that run if `roots` are called, and the objects they refer to. Models, tools and graphs are not entered.

    Of an object of a user's class, only fields and methods that the code names count.
    """
    return _walk(roots, _run_next)


def _run_next(item: Any) -> Iterator[Any]:
    if isinstance(item, types.FunctionType):
        for value in function_references(item):
            yield value
            if users(item) and not isinstance(value, _ANSWERED):
                yield from _named_members(item, value)
    elif isinstance(item, types.MethodType):
        yield item.__func__
        if isinstance(item.__func__, types.FunctionType):
            yield from _named_members(item.__func__, item.__self__)
    elif users_class(type(item)) and not isinstance(item, _ANSWERED):
        call = inspect.getattr_static(type(item), "__call__", None)
        yield from [types.MethodType(call, item)] if isinstance(call, types.FunctionType) else []
    elif not isinstance(item, _ANSWERED):
        yield from references(item)


def _named_members(function: types.FunctionType, owner: Any) -> Iterator[Any]:
    """The fields and bound methods of `owner` that the code of `function` may name."""
    is_class = isinstance(owner, type)
    if not users_class(owner if is_class else type(owner)) or (is_class and issubclass(owner, _ANSWERED)):
        return
    names = set(function.__code__.co_names) if makes_tools(function) else code_names(function)  # inner functions may be tools
    for name in sorted(names | {"__init__"} if is_class else names):
        value = _unwrapped(inspect.getattr_static(owner, name, None))
        if isinstance(value, types.MemberDescriptorType):
            value = getattr(owner, name, None)
        if isinstance(value, types.FunctionType):
            yield types.MethodType(value, owner)
        elif value is not None:
            yield value


def makes_tools(function: types.FunctionType) -> bool:
    """True if this function may create tools when it runs."""
    values = function_references(function)
    return any(each is tool or (isinstance(each, type) and issubclass(each, BaseTool)) for each in values)


_THREAD_CLASSES = (threading.Thread, Executor, ThreadPool)
_THREAD_NAMES = ("Thread", "Timer", "start_new_thread", "ThreadPoolExecutor", "ThreadPool", "run_in_executor")
"""Names in code that starts threads or submits work to a pool."""


def nodes_with_own_threads(graph: Pregel) -> list[str]:
    """Names of the nodes whose own code starts threads or uses a pool, sorted."""
    return sorted(name for name, node in graph.nodes.items() if any(map(_uses_threads, run_by([node.bound, *node.writers]))))


def _uses_threads(value: Any) -> bool:
    if not users(value):
        return isinstance(value, _THREAD_CLASSES)
    kinds = [each for each in function_references(value) if isinstance(each, type)]
    return not code_names(value).isdisjoint(_THREAD_NAMES) or any(issubclass(each, _THREAD_CLASSES) for each in kinds)


def has_synchronous_middleware(graph: Any) -> bool:
    """True if middleware has only synchronous hooks, so that the agent cannot be awaited."""
    middleware = sys.modules.get("langchain.agents.middleware.types")
    base = middleware.AgentMiddleware if middleware is not None else ()
    kinds = {type(each) for each in reachable(graph) if isinstance(each, base)}
    pairs = (("wrap_model_call", "awrap_model_call"), ("wrap_tool_call", "awrap_tool_call"))
    overridden = ([getattr(kind, hook) is not getattr(base, hook) for hook in pair] for kind in kinds for pair in pairs)
    return [True, False] in overridden


def runs_in_dream(tool: BaseTool) -> str:
    """ "a sub-agent" or "state only" for a tool that runs in a dream; else ""."""
    return "a sub-agent" if runs_an_agent(tool) else "state only" if changes_state_only(tool) else ""


def simulated_tools(graph: Any, pass_through: Sequence[str] = ()) -> tuple[list[BaseTool], list[str]]:
    """The agent's tools that a dream answers, and the names of those that really run."""
    tools = {tool.name: tool for tool in reachable(graph) if isinstance(tool, BaseTool)}
    running = [name for name, tool in tools.items() if name in pass_through or runs_in_dream(tool)]
    return [tool for name, tool in tools.items() if name not in running], running


_RUN_METHODS = {"invoke", "ainvoke", "stream", "astream", "batch", "abatch", "stream_events", "astream_events"}


def runs_an_agent(tool: BaseTool) -> bool:
    """True if the tool's code names a graph and a method that runs it. The graph's own tools are then simulated."""
    function: Any = inspect.unwrap(body(tool))
    owner: Any = tool
    if isinstance(function, types.MethodType):
        function, owner = function.__func__, function.__self__
        if _runs_graph(owner):  # a tool created from `graph.invoke`
            return True
    if not isinstance(function, types.FunctionType):
        return False
    if function.__module__ == "langchain_core.tools.convert":  # `Runnable.as_tool`
        return any(map(_runs_graph, function_references(function)))
    names = code_names(function)
    return bool(names & _RUN_METHODS) and any(_leads_to_graph(value, names) for value in (*named_values(function), owner))


def _runs_graph(runnable: Any) -> bool:
    """True for a graph, and for a chain or binding of one."""
    if isinstance(runnable, RunnableBindingBase):
        return _runs_graph(runnable.bound)
    if isinstance(runnable, RunnableSequence):
        return any(map(_runs_graph, runnable.steps))
    return isinstance(runnable, Pregel)


def _leads_to_graph(value: Any, names: set[str]) -> bool:
    """True for a graph, and an object with one in a value or named field."""
    if isinstance(value, Pregel):
        return True
    if isinstance(value, Mapping):
        return any(isinstance(each, Pregel) for each in value.values())
    fields = vars(value) if hasattr(value, "__dict__") and not isinstance(value, types.FunctionType) else {}
    return any(isinstance(fields.get(name), Pregel) for name in names & fields.keys())


_STATE_TOOLS = ("deepagents.", "langchain.agents.middleware.todo")
"""Modules whose tools do nothing but change the graph's state."""
_HARMLESS = {
    *("langchain", "langchain_core", "langgraph", "langgraph_supervisor", "langgraph_swarm"),
    *("builtins", "typing", "types", "json", "re", "math", "uuid", "datetime", "time", "enum", "operator"),
}
"""Packages whose functions and classes do not touch anything outside of the process."""
_ACTING = {
    *("open", "input", "print", "exec", "eval", "compile", "__import__", "setattr"),
    *("context", "config", "get_config", "get_runtime", "get_store", "ensure_config"),
}
"""Names by which a function may act even so. A run's context and config may hold any object of the user's."""
_INJECTED = re.compile(r"\b(RunnableConfig|InjectedToolArg)\b")
"""Annotations of arguments that no model writes, and that may hold any object of the user's."""
_CONSTANTS = (str, bytes, int, float, bool, type(None))


def changes_state_only(tool: BaseTool) -> bool:
    """True if a tool only changes the graph's state or hands over to another node.

    That is a known state tool, or a function that makes a `Command` from its arguments and harmless values alone.
    """
    function = body(tool)
    if str(getattr(function, "__module__", "")).startswith(_STATE_TOOLS):
        return True
    if function in (type(tool)._run, type(tool)._arun) or not isinstance(function, types.FunctionType):
        return False
    makes_command = any(value is Command for value in named_values(function))
    return makes_command and _has_harmless_arguments(function) and _is_harmless(function)


def _has_harmless_arguments(function: types.FunctionType) -> bool:
    """False if a parameter may be a run's config, or an object that acts."""
    hints = function.__annotations__
    with contextlib.suppress(NameError, TypeError):  # a name that only type checkers import: its text is used instead
        hints = get_type_hints(function, include_extras=True)
    classes = (part for hint in hints.values() for part in _parts(hint) if isinstance(part, type))
    return not any(_INJECTED.search(str(hint)) for hint in hints.values()) and all(map(_has_harmless_methods, classes))


def _parts(hint: Any) -> Iterator[Any]:
    """An annotation and those inside of it."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _has_harmless_methods(cls: type, seen: tuple[Any, ...] = ()) -> bool:
    """True if the user's methods of a class, inherited ones too, are harmless."""
    members = (_unwrapped(each) for owner in filter(users_class, cls.__mro__) for each in vars(owner).values())
    methods = (each for each in members if isinstance(each, types.FunctionType) and users(each))
    return all(_is_harmless(each, seen) for each in methods)


def _is_harmless(value: Any, seen: tuple[Any, ...] = ()) -> bool:
    """True for constants, members of `_HARMLESS` packages, and functions that use only such."""
    if isinstance(value, tuple | frozenset):
        return all(_is_harmless(each, seen) for each in value)
    if isinstance(value, types.FunctionType):
        if value.__name__ in _ACTING:  # imported by another name
            return False
        return _package(value) in _HARMLESS or any(value is each for each in seen) or _is_harmless_function(value, seen)
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
        if _package(value) in _HARMLESS:
            return True
        is_data = isinstance(value, type) and issubclass(value, BaseModel | Enum | dict)
        return is_data and _has_harmless_methods(cast(type, value), seen)
    return type(value).__module__ in ("typing", "re", "datetime", "uuid") or isinstance(value, _CONSTANTS)


def _is_harmless_function(function: types.FunctionType, seen: tuple[Any, ...]) -> bool:
    steps = (step for code in _codes(function) for step in dis.get_instructions(code))
    imported = {str(step.argval).partition(".")[0] for step in steps if step.opname == "IMPORT_NAME"}
    names = {*code_names(function), *(name for code in _codes(function) for name in code.co_varnames)}
    if not imported <= _HARMLESS or names & _ACTING:
        return False
    return all(_is_harmless(each, (*seen, function)) for each in named_values(function))


def _package(value: Any) -> str:
    """The package of a module, class or function."""
    return str(value.__name__ if isinstance(value, types.ModuleType) else value.__module__).partition(".")[0]
