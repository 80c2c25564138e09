"""Loads the user's code (`my_app.py:graph`), and distinguishes it from that of Python and packages."""

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from langchain_core.runnables.config import var_child_runnable_config

from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.event_loop import run_lasting

T = TypeVar("T")

_SIMULATION = (str(Path(__file__).parent / "simulate"), __file__)
_PACKAGES = {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
_PYTHON = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
LIBRARIES = tuple({*_PYTHON, *_PACKAGES, str(Path(__file__).parent)})
"""Folders of code that is not the user's: Python's own, installed packages, this library."""

_agent_packages: set[str] = set()
"""Folders of packages that an agent was loaded from. They count as the user's code."""

_roots: set[Path] = set()
"""Folders that agents were loaded from."""

started_by: ContextVar[str] = ContextVar("dreamgym_started_by", default="")
"""The user's line that started this thread or task, or submitted its work."""


def of_library(file: str) -> bool:
    """True if a file is Python's or a package's, and not the user's."""
    return file.startswith(_SIMULATION) or (file.startswith(LIBRARIES) and not file.startswith(tuple(_agent_packages)))


def users_class(cls: type) -> bool:
    """True for a class that the user's code defines; a notebook's `__main__` has no file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ == "__main__" or (file is not None and not of_library(file))


def users(function: Any) -> bool:
    """True for a Python function that the user's code defines."""
    if not isinstance(function, types.FunctionType):
        return False
    file = function.__code__.co_filename
    return function.__module__ == "__main__" or not (file.startswith("<") or of_library(file))


def users_frame(frame: types.FrameType) -> bool:
    """True if a frame runs a line of the user's."""
    file = frame.f_code.co_filename
    return not (file.startswith("<") or of_library(file))


# --- lines, as `FILE:LINE in FUNCTION` --------------------------------------------------------------------------------------

_EXECUTORS = ("langgraph.pregel._retry", "asyncio.events")
"""Modules that run a node or a task. Frames outside of theirs belong to the caller of the graph, not to the agent."""


def user_line() -> str:
    """The user's innermost line, else the line that started the thread, else the node."""
    for frame in frames():
        if frame.f_globals.get("__name__") in _EXECUTORS:
            break
        if users_frame(frame):
            return _line(frame.f_code, frame.f_lineno)
    node = ((var_child_runnable_config.get() or {}).get("metadata") or {}).get("langgraph_node")
    return started_by.get() or (f"node {node!r}" if node else "an unknown place")


def first_line(function: object) -> str:
    """The first line of a function of the user's; "" for one of a package."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return _line(code, code.co_firstlineno) if code is not None and not of_library(code.co_filename) else ""


def raising_line(error: BaseException) -> str:
    """The innermost line of the user's in an exception's traceback; "" without one."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):  # outermost first
        if users_frame(frame):
            line = _line(frame.f_code, number)
        elif frame.f_globals.get("__name__") in _EXECUTORS:
            line = ""
    return line


def error_text(error: BaseException) -> str:
    """An error's type and text. If it is not this library's, also the user's line that raised it."""
    line = "" if isinstance(error, DreamGymError) else raising_line(error)
    return f"{type(error).__name__}: {error}{f' at {line}' if line else ''}"


def _line(code: types.CodeType, number: int) -> str:
    return f"{code.co_filename}:{number} in {code.co_name}"


def frames() -> Iterator[types.FrameType]:
    """The stack's frames, innermost first."""
    return (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))


def load_agent(place: str) -> object:
    """Load an agent by `FILE.py:NAME` or `package.module:NAME`, compiled. Raises as `load_object`."""
    return compiled(load_object(place))


def compiled(agent: object) -> object:
    """Compile a `StateGraph`; return anything else unchanged."""
    return agent.compile() if hasattr(agent, "compile") and not hasattr(agent, "invoke") else agent


def load_object(place: str, **arguments: object) -> object:
    """Load an object by `FILE.py:NAME` or `package.module:NAME`. A function is called, and its result returned.

    It gets those of `arguments` whose names are parameters of it, and an empty `config`. One other required parameter gets the
    config too. If it returns a context manager, that is entered and stays open. Raises `ConfigurationError` if loading fails.
    """
    source, _, name = place.rpartition(":")
    if not source or not name:
        raise ConfigurationError(f"{place!r} names no object; write it as FILE.py:NAME or package.module:NAME")
    module = _explain_failure(source, lambda: _import_file(Path(source)) if source.endswith(".py") else _import_module(source))
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    if folder := next(iter(getattr(top, "__path__", ())), getattr(top, "__file__", None)):
        _agent_packages.add(folder)
    if not hasattr(module, name):
        raise ConfigurationError.unknown(f"name in {source}", name, [each for each in vars(module) if not each.startswith("_")])
    value = getattr(module, name)
    if not callable(value) or hasattr(value, "invoke") or hasattr(value, "compile"):
        return value
    return _explain_failure(place, lambda: _call_factory(place, value, {"config": _config(), **arguments}))


def _explain_failure(what: str, load: Callable[[], T]) -> T:
    """Call `load`; any error becomes a `ConfigurationError` with the user's line that raised it."""
    try:
        return load()
    except (DreamGymError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, of a module that is a script
        frames = traceback.extract_tb(error.__traceback__)
        lines = [each for each in frames if not (each.filename.startswith("<") or of_library(each.filename))]
        where = f" at {os.path.relpath(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""
        is_unset = isinstance(error, KeyError) and frames[-1].filename in (os.__file__, "<frozen os>")
        cause = f"the environment variable {error} is not set" if is_unset else f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{what} could not be loaded: {cause}{where}") from error


def _import_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file")
    path = path.resolve()
    root, name = path.parent, path.stem
    while (root / "__init__.py").exists():  # in a package: its relative imports need the whole name
        root, name = root.parent, f"{root.name}.{name}"
    sys.path.insert(0, str(root))
    _forget_modules_of_others(root)
    if root != path.parent:  # a dot may be in a file's own name, too
        return importlib.import_module(name.removesuffix(".__init__"))
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded  # a second copy would have other functions, which cannot be pickled
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _forget_modules_of_others(root: Path) -> None:
    """Unload other agents' modules whose name this folder also has, as in two checkouts."""
    roots = sorted(_roots | {root}, key=lambda each: len(each.parts), reverse=True)  # a checkout may lie inside another
    for name, module in list(sys.modules.items()):
        file, top = getattr(module, "__file__", None) or "", root / name.partition(".")[0]
        owner = next((each for each in roots if file.startswith(f"{each}{os.sep}")), root)
        is_own = file.startswith((f"{top}.", f"{top}{os.sep}"))  # this root would find the same
        if owner != root and not is_own and not of_library(file) and (top.is_dir() or top.with_suffix(".py").is_file()):
            del sys.modules[name]
    _roots.add(root)


def _import_module(name: str) -> types.ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _call_factory(place: str, factory: Callable[..., object], arguments: Mapping[str, object]) -> object:
    Parameter, parameters = inspect.Parameter, inspect.signature(factory).parameters.values()
    named = {each.name: arguments[each.name] for each in parameters if each.name in arguments}
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    needed = [each for each in parameters if each.default is Parameter.empty and each.kind in kinds and each.name not in named]
    if len(needed) > 1 or any(each.kind is Parameter.KEYWORD_ONLY for each in needed):
        raise ConfigurationError(
            f"{place} needs {', '.join(each.name for each in needed)}; a factory's parameters may be named "
            f"{', '.join(sorted(arguments))}, and one other parameter gets an empty config"
        )
    value = factory(*([_config()] if needed else []), **named)
    value = run_lasting(_await(value)) if inspect.isawaitable(value) else value
    if isinstance(value, contextlib._AsyncGeneratorContextManager):
        _entered.append(value)
        return run_lasting(value.__aenter__())
    if isinstance(value, contextlib._GeneratorContextManager):
        _entered.append(value)
        return value.__enter__()
    return value


_entered: list[object] = []
"""Open context managers of factories, kept alive: a collected one would close what its agent uses."""


def _config() -> dict[str, object]:
    return {"configurable": {}}


async def _await(value: Awaitable[object]) -> object:
    return await value
