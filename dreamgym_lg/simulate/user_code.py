"""Tells the user's own code from that of Python and packages."""

import inspect
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from langchain_core.runnables.config import var_child_runnable_config

_SIMULATION = str(Path(__file__).parent)
_PACKAGES = {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
_PYTHON = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
LIBRARIES = tuple({*_PYTHON, *_PACKAGES, str(Path(__file__).parents[1])})
"""Folders of code that is not the user's: Python's own, every folder that packages are installed in, and this library."""

_installed: set[str] = set()
"""Folders among these that are the user's all the same."""

started_by: ContextVar[str] = ContextVar("dreamgym_started_by", default="")
"""The user's line that started this thread or task, or gave it its work."""


def count_as_users(folder: str) -> None:
    """Count an installed package as the user's own."""
    _installed.add(folder)


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
"""Modules that run a node or a task: the lines further out are of whoever runs the graph, and none of the agent's."""


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


def _line(code: types.CodeType, number: int) -> str:
    return f"{code.co_filename}:{number} in {code.co_name}"


def frames() -> Iterator[types.FrameType]:
    """The stack's frames, innermost first."""
    return (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
