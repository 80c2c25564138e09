"""Who does it: the frames of a real access tell the user's line, and whether it is Python's own doing, once per process."""

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType

from langchain_core.runnables.config import var_child_runnable_config

from dreamgym_lg.simulate.object_graph import of_library

started_by: ContextVar[str] = ContextVar("dreamgym_started_by", default="")
"""The user's line that started this thread or task, or gave it its work."""

_OURS = str(Path(__file__).parents[1])


def user_line() -> str:
    """The innermost line that is neither Python's, nor a package's, nor ours; else who started the thread; else the node."""
    for frame in _frames():
        if is_users(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    node = ((var_child_runnable_config.get() or {}).get("metadata") or {}).get("langgraph_node")
    return started_by.get() or (f"node {node!r}" if node else "an unknown place")


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
