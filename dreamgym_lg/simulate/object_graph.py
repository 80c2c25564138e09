"""Follows the references of objects: fields, closures, methods, partials, globals that code names."""

import contextlib
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore

from dreamgym_lg.simulate.user_code import users, users_class

MAX_OBJECTS = 20_000
"""Ends a search that has gone astray."""

_LEAVES = (str, bytes, int, float, complex, bool, type(None), BaseMessage)
_OPENED = ("langchain", "langgraph", "deepagents")
"""Packages whose objects are looked into all the same: graphs, nodes, agents and tools are made of them."""


def reachable(root: Any) -> Iterator[Any]:
    """Everything that `root` refers to, itself first, each object once."""
    seen: set[int] = set()
    waiting = [root]
    while waiting and len(seen) < MAX_OBJECTS:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (*_LEAVES, type, types.ModuleType)):
            continue
        seen.add(id(item))
        yield item
        waiting.extend(references(item))


def references(item: Any) -> Iterator[Any]:
    """The objects that one refers to. Of an object of the user's that is also its class's methods and attributes."""
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
    elif type(item).__module__.startswith(_OPENED) or users_class(type(item)):
        yield from _class_members(type(item))
        yield from vars(item).values() if hasattr(item, "__dict__") else ()
        slots = [name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
        yield from (getattr(item, name) for name in slots if hasattr(item, name))


def _class_members(cls: type) -> Iterator[Any]:
    """The methods and class attributes of the user's own classes."""
    for owner in filter(users_class, cls.__mro__):
        for value in vars(owner).values():
            value = value.fget if isinstance(value, property) else value
            yield value.__func__ if isinstance(value, staticmethod | classmethod) else value


def function_references(function: types.FunctionType) -> Iterator[Any]:
    """A function's named values and what it wraps; globals only of the user's code."""
    yield from named_values(function, globals=users(function))
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield wrapped


def named_values(function: types.FunctionType, *, globals: bool = True) -> Iterator[Any]:
    """The closure's cells, the defaults and the globals named in the code, nested functions included."""
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield cell.cell_contents
    for code in codes(function) if globals else ():
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    """The function's code, and that of the functions and classes inside of it."""
    parts = [function.__code__]
    for code in parts:  # which grows
        yield code
        parts.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def body(tool: BaseTool) -> Any:
    """The function that does a tool's work."""
    return getattr(tool, "func", None) or getattr(tool, "coroutine", None) or type(tool)._run


# --- what runs --------------------------------------------------------------------------------------------------------------

_ANSWERED = (BaseTool, BaseChatModel, Pregel, BaseCheckpointSaver, BaseStore, BaseCache)
"""What an episode answers for or replaces: what lies behind it does not run, or is looked at by itself."""


def run_by(roots: Iterable[Any]) -> Iterator[Any]:
    """The functions that calls of `roots` run, and the objects they refer to.

    Of an object of the user's class only the fields and methods count that the code names. Models, tools, graphs,
    checkpointers and stores are yielded and not opened.
    """
    seen: dict[Any, Any] = {}  # kept alive: an id is used again once its object is gone
    waiting = list(roots)
    while waiting and len(seen) < MAX_OBJECTS:
        item = waiting.pop()
        # a bound method is made anew each time that it is looked up
        key = (id(item.__self__), id(item.__func__)) if isinstance(item, types.MethodType) else id(item)
        if key in seen or isinstance(item, _LEAVES):
            continue
        seen[key] = item
        yield item
        if not isinstance(item, (*_ANSWERED, types.ModuleType, type)):
            waiting.extend(_run_next(item))


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
    elif users_class(type(item)):
        call = inspect.getattr_static(type(item), "__call__", None)
        yield from [types.MethodType(call, item)] if isinstance(call, types.FunctionType) else []
    else:
        yield from references(item)


def _named_members(function: types.FunctionType, owner: Any) -> Iterator[Any]:
    """The fields and bound methods of `owner` that the code of `function` may name."""
    is_class = isinstance(owner, type)
    if not users_class(owner if is_class else type(owner)) or (is_class and issubclass(owner, _ANSWERED)):
        return
    names = {name for code in run_codes(function) for name in code.co_names}
    for name in sorted(names | {"__init__"} if is_class else names):
        value = inspect.getattr_static(owner, name, None)
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, types.MemberDescriptorType):
            value = getattr(owner, name, None)
        if isinstance(value, types.FunctionType):
            yield types.MethodType(value, owner)
        elif value is not None:
            yield value


def run_codes(function: types.FunctionType) -> list[types.CodeType]:
    """A function's code with that of inner functions, unless those may be bodies of tools."""
    return [function.__code__] if makes_tools(function) else list(codes(function))


def makes_tools(function: types.FunctionType) -> bool:
    """Tells if tools are made when this code runs."""
    values = function_references(function)
    return any(each is tool or (isinstance(each, type) and issubclass(each, BaseTool)) for each in values)
