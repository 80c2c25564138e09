"""What an object refers to: through fields, closures, bound methods, partials and the globals its code names."""

import contextlib
import datetime
import dis
import functools
import inspect
import re
import sys
import sysconfig
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.runnables import RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore
from langgraph.types import Command
from pydantic import BaseModel

_PACKAGES = {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
_OURS = str(Path(__file__).parents[1])
LIBRARIES = tuple({*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), *_PACKAGES, _OURS})
"""Folders of code that is not the user's: Python's own, every folder that packages are installed in, and this package."""

_installed: set[str] = set()
"""Folders among these that are the user's all the same."""


def count_as_users(folder: str) -> None:
    """The user's own package, where it is installed as any other: without this its code is taken for a library's."""
    _installed.add(folder)


def of_library(file: str) -> bool:
    """Whether a file is Python's or an installed package's, and not counted as the user's."""
    return file.startswith(LIBRARIES) and not file.startswith(tuple(_installed))


_OPENED = ("langchain", "langgraph", "deepagents")
"""Packages whose objects are looked into all the same: graphs, nodes, agents and tools are made of them."""


def reachable(root: Any, *, limit: int = 20_000) -> Iterator[Any]:
    """Everything that `root` refers to, itself first, each object once; `limit` ends a search that has gone astray."""
    seen: set[int] = set()
    waiting = [root]
    while waiting and len(seen) < limit:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, _LEAVES):
            continue
        seen.add(id(found))
        yield found
        waiting.extend(references(found))


_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, BaseMessage)


def references(found: Any) -> Iterator[Any]:
    """What one object refers to. Of an object of the user's that is also its class's methods and attributes."""
    if isinstance(found, types.FunctionType):
        yield from function_references(found)
    elif isinstance(found, types.MethodType):
        yield found.__self__
        yield found.__func__
    elif isinstance(found, functools.partial):
        yield from (found.func, *found.args, *found.keywords.values())
    elif isinstance(found, functools._lru_cache_wrapper):
        yield found.__wrapped__
    elif isinstance(found, Mapping):
        yield from found.values()
    elif isinstance(found, list | tuple | set | frozenset):
        yield from found
    elif not _foreign(type(found)):
        yield from _of_class(type(found))
        yield from vars(found).values() if hasattr(found, "__dict__") else ()
        slots = [name for cls in type(found).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
        yield from (getattr(found, name) for name in slots if hasattr(found, name))


def _foreign(cls: type) -> bool:
    """Objects of other packages are not opened, except those that graphs are made of."""
    return not cls.__module__.startswith(_OPENED) and not users_class(cls)


def users_class(cls: type) -> bool:
    """Whether a class is defined in the user's own code; a notebook's `__main__` has no file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ == "__main__" or (file is not None and not of_library(file))


def _of_class(cls: type) -> Iterator[Any]:
    """The methods and class attributes of the user's own classes."""
    for owner in filter(users_class, cls.__mro__):
        for value in vars(owner).values():
            value = value.fget if isinstance(value, property) else value
            yield value.__func__ if isinstance(value, staticmethod | classmethod) else value


def users(function: Any) -> bool:
    """Whether a function is the user's own code."""
    if not isinstance(function, types.FunctionType):
        return False
    file = function.__code__.co_filename
    return function.__module__ == "__main__" or not (file.startswith("<") or of_library(file))


def function_references(function: types.FunctionType) -> Iterator[Any]:
    """The closure's cells, the defaults, and the globals named in the code (nested functions included)."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield wrapped
    for code in codes(function) if users(function) else ():
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """The function's code, and that of the functions and classes inside of it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code
        waiting.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def body(tool: BaseTool) -> Any:
    """The function that does a tool's work."""
    return getattr(tool, "func", None) or getattr(tool, "coroutine", None) or type(tool)._run


_RUNS = {"invoke", "ainvoke", "stream", "astream", "batch", "abatch", "stream_events", "astream_events"}


_STATE_TOOLS = ("deepagents.", "langchain.agents.middleware.todo")
"""Modules whose tools do nothing but change the graph's state."""


def changes_state_only(tool: BaseTool) -> bool:
    """Whether a tool only changes the graph's state or hands over to another node, so that it runs in a dream too.

    So do LangChain's and deepagents' own, those of langgraph-supervisor and langgraph-swarm, and every function that makes a
    `Command` of nothing but its arguments. What refers to anything else is simulated: it may act on the world.
    """
    function = body(tool)
    if str(getattr(function, "__module__", "")).startswith(_STATE_TOOLS):
        return True
    if function is type(tool)._run or not isinstance(function, types.FunctionType):
        return False
    return any(found is Command for found in _named_values(function)) and _is_harmless(function)


_HARMLESS = {
    *("langchain", "langchain_core", "langgraph", "langgraph_supervisor", "langgraph_swarm"),
    *("builtins", "typing", "types", "json", "re", "math", "uuid", "datetime", "time", "enum", "operator"),
}
"""Packages whose functions and classes touch nothing outside of the process by themselves."""

_ACTING = {"open", "input", "print", "exec", "eval", "compile", "__import__", "setattr", "context", "config"}
"""Names by which a function may act all the same: a run's context and config hold whatever the user put there."""


def _is_harmless(found: Any, seen: tuple[Any, ...] = ()) -> bool:
    """Whether what code refers to is a constant, a part of LangChain or LangGraph, or a function of such alone."""
    if isinstance(found, tuple | frozenset):
        return all(_is_harmless(each, seen) for each in found)
    if isinstance(found, str | bytes | int | float | bool | type(None)):
        return True
    if isinstance(found, types.ModuleType):
        return found.__name__.partition(".")[0] in _HARMLESS
    if not isinstance(found, type | types.FunctionType | types.BuiltinFunctionType):
        return type(found).__module__ in ("typing", "re", "datetime", "uuid")
    if str(found.__module__).partition(".")[0] in _HARMLESS:
        return True
    if not isinstance(found, types.FunctionType):
        return isinstance(found, type) and issubclass(found, BaseModel | Enum | dict)
    if any(found is each for each in seen):
        return True
    inside = list(codes(found))
    named = {name for code in inside for name in (*code.co_names, *code.co_varnames)}
    imported = {step.argval for code in inside for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"}
    if named & _ACTING or any(str(name).partition(".")[0] not in _HARMLESS for name in imported):
        return False
    values = list(_named_values(found))
    if not _methods(inside) <= {*_METHODS, *(name for each in values if _is_librarys(each) for name in dir(each))}:
        return False  # of what the state or a run's config holds, a client perhaps
    return all(_is_harmless(each, (*seen, found)) for each in values)


_METHODS = {
    *(name for kind in (str, list, dict, set, int, float, datetime.datetime, re.Pattern, re.Match) for name in dir(kind)),
    *(name for kind in (BaseModel, ToolMessage, AIMessage, BaseStore) for name in dir(kind)),
}
"""Of values: they touch nothing outside of the process."""


def _methods(inside: Sequence[types.CodeType]) -> set[str]:
    """The names of the methods that code calls."""
    steps = [step for code in inside for step in dis.get_instructions(code)]
    return {
        str(step.argval)
        for step in steps
        if step.opname == "LOAD_METHOD" or (step.opname == "LOAD_ATTR" and _ATTR_SAYS_METHOD and (step.arg or 0) & 1)
    }


_ATTR_SAYS_METHOD = sys.version_info >= (3, 12)


def _is_librarys(found: Any) -> bool:
    """Whether it is a module or a class of `_HARMLESS`, so that what it offers is too."""
    name = found.__name__ if isinstance(found, types.ModuleType) else found.__module__ if isinstance(found, type) else ""
    return name.partition(".")[0] in _HARMLESS


def _named_values(function: types.FunctionType) -> Iterator[Any]:
    """What a function's closure, defaults and global names hold, be it the user's or a library's."""
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield cell.cell_contents
    for code in codes(function):
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def runs_an_agent(tool: BaseTool) -> bool:
    """Whether the tool's body calls a graph: a sub-agent, whose own tools are simulated while it really runs.

    The code must name both the graph and a way to run it: an object that merely holds one, as an application does, makes no
    tool a sub-agent. What is not seen here is simulated, so that nothing real runs by mistake.
    """
    function = inspect.unwrap(body(tool))
    if isinstance(function, types.MethodType):  # a tool made of `graph.invoke`
        return _runs_graph(function.__self__)
    if not isinstance(function, types.FunctionType):
        return False
    if function.__module__ == "langchain_core.tools.convert":  # `Runnable.as_tool`
        return any(_runs_graph(found) for found in function_references(function))
    names = {name for code in codes(function) for name in code.co_names}
    return bool(names & _RUNS) and any(_leads_to_graph(found, names) for found in (*function_references(function), tool))


def _runs_graph(runnable: Any) -> bool:
    """Whether it is a graph, or a chain or binding of one."""
    if isinstance(runnable, RunnableBindingBase):
        return _runs_graph(runnable.bound)
    if isinstance(runnable, RunnableSequence):
        return any(map(_runs_graph, runnable.steps))
    return isinstance(runnable, Pregel)


def _leads_to_graph(found: Any, names: set[str]) -> bool:
    if isinstance(found, Pregel):
        return True
    if isinstance(found, Mapping):
        return any(isinstance(value, Pregel) for value in found.values())
    held = vars(found) if hasattr(found, "__dict__") and not isinstance(found, types.FunctionType) else {}
    return any(isinstance(held.get(name), Pregel) for name in names & held.keys())


_TEXT = (str, Any, None, type(None), inspect.Signature.empty)


def returns(tool: BaseTool) -> Any:
    """What a tool's body promises to return, `Command` for `Command[...]`; None if it does not say."""
    try:
        kind = typing.get_type_hints(inspect.unwrap(body(tool))).get("return")
    except Exception:  # a name that exists for type checkers only
        return None
    return Command if typing.get_origin(kind) is Command else kind


def returned_type(tool: BaseTool) -> Any:
    """The structure that a tool's body promises to return; None where it is text, unknown, or LangGraph's own."""
    kind = returns(tool)
    if kind is None or kind in _TEXT:
        return None
    parts = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for part in parts:
        part = typing.get_origin(part) or part
        if part is str or (isinstance(part, type) and issubclass(part, Command | BaseMessage | BaseException)):
            return None
    return None if tool.response_format == "content_and_artifact" else kind
