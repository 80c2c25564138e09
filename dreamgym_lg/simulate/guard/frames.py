"""Who does it: the frames of a real access tell the user's line, and whether it is Python's own doing, once per process."""

import inspect
import sys
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType

from langchain_core.runnables.config import var_child_runnable_config

from dreamgym_lg.simulate.object_graph import of_library

started_by: ContextVar[str] = ContextVar("dreamgym_started_by", default="")
"""The user's line that started this thread or task, or gave it its work."""

_OURS = str(Path(__file__).parents[1])


def user_line() -> str:
    """The innermost line that is neither Python's, nor a package's, nor ours; else who started the thread; else the node."""
    for frame in _frames():
        if frame.f_globals.get("__name__") in _RUNNING:
            break
        if is_users(frame):
            return _told(frame.f_code, frame.f_lineno)
    node = ((var_child_runnable_config.get() or {}).get("metadata") or {}).get("langgraph_node")
    return started_by.get() or (f"node {node!r}" if node else "an unknown place")


_RUNNING = ("langgraph.pregel._retry", "asyncio.events")
"""Modules that run a node or a task: the lines further out are of whoever runs the graph, and none of the agent's."""


def first_line(function: object) -> str:
    """Where a function of the user's begins; "" for one of a package."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return _told(code, code.co_firstlineno) if code is not None and not of_library(code.co_filename) else ""


def raising_line(error: BaseException) -> str:
    """The innermost line of the user's that an exception came through; "" if there is none."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):  # outermost first
        if is_users(frame):
            line = _told(frame.f_code, number)
        elif frame.f_globals.get("__name__") in _RUNNING:
            line = ""
    return line


def _told(code: CodeType, number: int) -> str:
    return f"{code.co_filename}:{number} in {code.co_name}"


_ASKING = ("platform", "ctypes.util", "uuid", "distro", "multiprocessing.resource_tracker")
"""Modules that start programs and write temporary files only to learn about this machine, or to clean up after Python."""


def is_of_the_process(*, network: bool) -> bool:
    """Whether the innermost user's line has Python import a package, cache bytecode or ask about the machine.

    Each process does that once, whoever comes first: a package writes its caches when it is imported, and Python tries
    which folder takes temporary files. `network`: the access is one of the network, which is never excused.
    """
    for frame in _frames():
        if network or is_users(frame):
            return False
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module in _ASKING or (module, name) == ("tempfile", "_get_default_tempdir"):
            return True
        if frame.f_code.co_filename.startswith("<frozen importlib") and name == "_cache_bytecode":
            return True
        if name == "<module>" and frame.f_back and frame.f_back.f_code.co_filename.startswith("<frozen importlib"):
            return True
    return False


def is_users(frame: FrameType) -> bool:
    """Whether it is a line of the user's."""
    file = frame.f_code.co_filename
    return not (file.startswith((_OURS, "<")) or of_library(file))


def _frames() -> Iterator[FrameType]:
    """Innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
