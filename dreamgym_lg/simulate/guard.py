"""Stops what would touch the real world while a dreamed episode is active; it fails closed.

Python raises an audit event before it happens; the few functions without one are wrapped. What the guard raises is no
`Exception`, so that `except Exception` does not get past it; and what was stopped is kept, so that code which swallows even
that still fails its episode. Not seen: what is written to a file or a database that was open before, and native code.
"""

import _posixsubprocess
import functools
import inspect
import logging
import os
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import Pool, ThreadPool
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from dreamgym_lg.simulate.context import Blocked, ContextEpisode, RealAccessBlocked, guarded_episode
from dreamgym_lg.simulate.dispatch import Args, Handler, Kwargs, Method, dispatch
from dreamgym_lg.simulate.guard_checks import NETWORK, WATCHED, Allow
from dreamgym_lg.simulate.ownership import is_collecting, patch_deferred, run_in
from dreamgym_lg.simulate.user_code import frames, user_line, users_frame


class Guard:
    """The guard of one episode: what it allows, and what it stopped. Args: `on_blocked`, called with each access at once."""

    def __init__(self, allow: Allow, on_blocked: Callable[[Blocked], object]) -> None:
        self.allow, self._on_blocked = allow, on_blocked
        self.blocked: list[Blocked] = []

    def check(self, event: str, args: Sequence[Any]) -> None:
        """Raise `RealAccessBlocked` if this audit event would touch what is not allowed."""
        target = WATCHED[event](args, self.allow)
        if target is not None and (WATCHED[event] in NETWORK or not _is_of_the_process()):
            blocked = Blocked(event, target, user_line())
            self.blocked.append(blocked)
            self._on_blocked(blocked)
            raise RealAccessBlocked(blocked)


_ASKING = ("platform", "ctypes.util", "uuid", "distro", "multiprocessing.resource_tracker")
"""Modules that start programs and write temporary files only to learn about this machine, or to clean up after Python."""


def _is_of_the_process() -> bool:
    """Tells if the innermost user's line has Python import a package, cache bytecode or ask about the machine.

    Each process does that once, whoever comes first: a package writes its caches when it is imported, and Python tries
    which folder takes temporary files.
    """
    for frame in frames():
        if users_frame(frame):
            return False
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module in _ASKING or (module, name) == ("tempfile", "_get_default_tempdir"):
            return True
        if frame.f_code.co_filename.startswith("<frozen importlib") and name == "_cache_bytecode":
            return True
        if name == "<module>" and frame.f_back and frame.f_back.f_code.co_filename.startswith("<frozen importlib"):
            return True
    return False


# --- watching the process ---------------------------------------------------------------------------------------------------

_WITHOUT_EVENT: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (os, "os", ("sendfile", "write", "writev", "pwrite", "pwritev", "posix_fallocate", "splice", "copy_file_range")),
    (os, "os", ("mkfifo", "mknod")),
    (signal, "signal", ("raise_signal", "pidfd_send_signal")),
    (_posixsubprocess, "process", ("fork_exec",)),
    (socket.socket, "socket", ("send", "sendall", "sendfile")),
    (ssl.SSLSocket, "socket", ("send", "sendall", "write")),
)
"""Owner, its name in events, and functions of which Python raises no audit event."""

_installed = False


def install_guard() -> None:
    """Watch this process's audit events; idempotent, and for good: an audit hook cannot be removed.

    Outside of guarded episodes an event costs one dictionary look-up.
    """
    global _installed
    if _installed:
        return
    _installed = True
    sys.addaudithook(_hook)
    for owner, event, names in _WITHOUT_EVENT:
        for name in names:
            if original := getattr(owner, name, None):  # not every system has each
                setattr(owner, name, _with_event(f"{event}.{name}", original, connected=event == "socket"))
    dispatch(BaseProcess, "start", _checking("process.start"))
    dispatch(ProcessPoolExecutor, "submit", _checking("process.submit"))
    dispatch(Pool, "_check_running", _submit_to_pool)  # which each of its methods calls first
    dispatch(SharedMemory, "__init__", _checking("shared_memory.open"))
    sqlite3.connect = sqlite3.dbapi2.connect = _connecting(sqlite3.connect)  # type: ignore[assignment]
    setattr(subprocess.Popen, "stdin", property(_stdin, _set_stdin))  # noqa: B010  # mypy knows no such property
    dispatch(logging.Handler, "handle", _handle_record)
    patch_deferred()


def _hook(event: str, args: Sequence[Any]) -> None:
    if event in WATCHED and (episode := guarded_episode()) is not None and episode.guard is not None and not is_collecting():
        episode.guard.check(event, args)


def _with_event(event: str, original: Method, *, connected: bool) -> Method:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if guarded_episode() is not None:
            positional = inspect.signature(original).bind(*args, **kwargs).args if kwargs else args
            _hook(event, (positional[0], None) if connected else positional)
        return original(*args, **kwargs)

    return function


def _checking(event: str) -> Handler:
    def check(episode: ContextEpisode, original: Method, owner: Any, args: Args, kwargs: Kwargs) -> Any:
        _hook(event, args or (owner,))
        return original(owner, *args, **kwargs)

    return check


def _submit_to_pool(episode: ContextEpisode, original: Method, pool: Pool, args: Args, kwargs: Kwargs) -> None:
    if not isinstance(pool, ThreadPool):
        _hook("process.submit", (pool,))
    original(pool)


def _connecting(original: Callable[..., sqlite3.Connection]) -> Callable[..., sqlite3.Connection]:
    @functools.wraps(original)
    def connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = original(*args, **kwargs)
        if (episode := guarded_episode()) is not None and episode.guard is not None:
            connection.set_authorizer(_authorize)
        return connection

    return connect


def _authorize(action: int, name: str | None, *_: Any) -> int:
    """Also a database in memory may attach files, or be written to one."""
    try:
        if action == sqlite3.SQLITE_ATTACH:
            _hook("sqlite3.attach", (name,))
    except RealAccessBlocked:  # SQLite would drop it
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _stdin(process: subprocess.Popen[Any]) -> Any:
    """Inside an episode it is stopped already that code asks for it: what is written to a pipe is no event."""
    pipe = vars(process)["stdin"]
    if pipe is not None:
        _hook("subprocess.stdin", (process.args,))
    return pipe


def _set_stdin(process: subprocess.Popen[Any], pipe: Any) -> None:
    vars(process)["stdin"] = pipe


def _handle_record(episode: ContextEpisode, original: Method, handler: Any, args: Args, kwargs: Kwargs) -> Any:
    """A log's own files are opened late and rolled over: no doing of the agent's. Logs that go elsewhere are stopped."""
    return run_in(None if isinstance(handler, logging.FileHandler) else episode, original, handler, *args, **kwargs)
