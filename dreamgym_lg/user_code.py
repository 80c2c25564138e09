"""Loads the user's code (`my_app.py:graph`), and tells it from that of Python and packages."""

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
"""Folders of code that is not the user's. Python's own, every folder that packages are installed in, and this library."""

_installed: set[str] = set()
"""Folders among these that are the user's all the same."""

_roots: set[Path] = set()
"""Folders that agents were loaded from."""

started_by: ContextVar[str] = ContextVar("dreamgym_started_by", default="")
"""The user's line that started this thread or task, or gave it its work."""


def of_library(file: str) -> bool:
    """Tells if a file is Python's or a package's, and not counted as the user's."""
    return file.startswith(_SIMULATION) or (file.startswith(LIBRARIES) and not file.startswith(tuple(_installed)))


def users_class(cls: type) -> bool:
    """Tells if a class is the user's own; a notebook's `__main__` has no file."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__module__ == "__main__" or (file is not None and not of_library(file))


def users(function: Any) -> bool:
    """Tells if a function is the user's own code."""
    if not isinstance(function, types.FunctionType):
        return False
    file = function.__code__.co_filename
    return function.__module__ == "__main__" or not (file.startswith("<") or of_library(file))


def users_frame(frame: types.FrameType) -> bool:
    """Tells if a frame runs a line of the user's."""
    file = frame.f_code.co_filename
    return not (file.startswith("<") or of_library(file))


# --- lines, as `FILE:LINE in FUNCTION` --------------------------------------------------------------------------------------

_RUNNING = ("langgraph.pregel._retry", "asyncio.events")
"""Modules that run a node or a task. Lines further out are of whoever runs the graph, and none of the agent's."""


def user_line() -> str:
    """The innermost line of the user's; else who started the thread; else the node."""
    for frame in frames():
        if frame.f_globals.get("__name__") in _RUNNING:
            break
        if users_frame(frame):
            return _line(frame.f_code, frame.f_lineno)
    node = ((var_child_runnable_config.get() or {}).get("metadata") or {}).get("langgraph_node")
    return started_by.get() or (f"node {node!r}" if node else "an unknown place")


def first_line(function: object) -> str:
    """Where a function of the user's begins; "" for one of a package."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return _line(code, code.co_firstlineno) if code is not None and not of_library(code.co_filename) else ""


def raising_line(error: BaseException) -> str:
    """The innermost line of the user's that an exception came through; else ""."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):  # outermost first
        if users_frame(frame):
            line = _line(frame.f_code, number)
        elif frame.f_globals.get("__name__") in _RUNNING:
            line = ""
    return line


def error_text(error: BaseException) -> str:
    """An error with its type, and the line of the user's that raised it. This library's own say enough."""
    line = "" if isinstance(error, DreamGymError) else raising_line(error)
    return f"{type(error).__name__}: {error}{f' at {line}' if line else ''}"


def _line(code: types.CodeType, number: int) -> str:
    return f"{code.co_filename}:{number} in {code.co_name}"


def frames() -> Iterator[types.FrameType]:
    """The stack's frames, innermost first."""
    return (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))


def load_agent(place: str) -> object:
    """The agent behind `FILE.py:NAME` or `package.module:NAME`, compiled; raises what `load_object` raises."""
    return compiled(load_object(place))


def compiled(agent: object) -> object:
    """A `StateGraph` compiled; anything else as it is."""
    return agent.compile() if hasattr(agent, "compile") and not hasattr(agent, "invoke") else agent


def load_object(place: str, **arguments: object) -> object:
    """The object behind `FILE.py:NAME` or `package.module:NAME`. A function is called with those of `arguments` that it names.

    `config` is one with nothing configurable, which one other positional parameter gets, too. A context manager that it gives
    is entered and stays open. Raises `ConfigurationError` if loading fails.
    """
    source, _, name = place.rpartition(":")
    if not source or not name:
        raise ConfigurationError(f"{place!r} names no object; write it as FILE.py:NAME or package.module:NAME")
    module = _loading(source, lambda: _from_file(Path(source)) if source.endswith(".py") else _from_module(source))
    top = sys.modules[module.__name__.partition(".")[0]]
    _installed.add(next(iter(getattr(top, "__path__", ())), top.__file__ or ""))  # counts as the user's own
    if not hasattr(module, name):
        raise ConfigurationError.unknown(f"name in {source}", name, [each for each in vars(module) if not each.startswith("_")])
    value = getattr(module, name)
    is_factory = callable(value) and not hasattr(value, "invoke") and not hasattr(value, "compile")
    return _loading(place, lambda: _called(place, value, {"config": _config(), **arguments})) if is_factory else value


def _loading(what: str, load: Callable[[], T]) -> T:
    """Load, and raise errors of the user's code with the place they came from."""
    try:
        return load()
    except (DreamGymError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too, of a module that is a script
        frames = traceback.extract_tb(error.__traceback__)
        lines = [each for each in frames if not (each.filename.startswith("<") or of_library(each.filename))]
        where = f" at {os.path.relpath(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""
        unset = isinstance(error, KeyError) and frames[-1].filename in (os.__file__, "<frozen os>")
        cause = f"the environment variable {error} is not set" if unset else f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{what} could not be loaded: {cause}{where}") from error


def _from_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file")
    path = path.resolve()
    root, name = path.parent, path.stem
    while (root / "__init__.py").exists():  # in a package: its relative imports need the whole name
        root, name = root.parent, f"{root.name}.{name}"
    sys.path.insert(0, str(root))
    _forget_others(root)
    if "." in name:
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


def _forget_others(root: Path) -> None:
    """Forget modules of other agents' folders that this one has its own of. Two checkouts do."""
    others = tuple(f"{each}{os.sep}" for each in _roots - {root})
    for name, module in list(sys.modules.items()):
        file, top = getattr(module, "__file__", None) or "", root / name.partition(".")[0]
        foreign = file.startswith(others) and not file.startswith(f"{root}{os.sep}") and not of_library(file)
        if foreign and (top.is_dir() or top.with_suffix(".py").is_file()):
            del sys.modules[name]
    _roots.add(root)


def _from_module(name: str) -> types.ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _called(place: str, factory: Callable[..., object], arguments: Mapping[str, object]) -> object:
    Parameter, parameters = inspect.Parameter, inspect.signature(factory).parameters.values()
    named = {each.name: arguments[each.name] for each in parameters if each.name in arguments}
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    needed = [each for each in parameters if each.default is Parameter.empty and each.kind in kinds and each.name not in named]
    if len(needed) > 1 or any(each.kind is Parameter.KEYWORD_ONLY for each in needed):
        raise ConfigurationError(
            f"{place} needs {', '.join(each.name for each in needed)}; a function gets what it names of: "
            f"{', '.join(sorted(arguments))}; one other parameter gets an empty config"
        )
    value = factory(*([_config()] if needed else []), **named)
    value = run_lasting(_awaited(value)) if inspect.isawaitable(value) else value
    if isinstance(value, contextlib._AsyncGeneratorContextManager):
        _entered.append(value)
        return run_lasting(value.__aenter__())
    if isinstance(value, contextlib._GeneratorContextManager):
        _entered.append(value)
        return value.__enter__()
    return value


_entered: list[object] = []
"""Context managers of factories. They stay open as long as the process: a collected one would close what its agent uses."""


def _config() -> dict[str, object]:
    return {"configurable": {}}


async def _awaited(value: Awaitable[object]) -> object:
    return await value
