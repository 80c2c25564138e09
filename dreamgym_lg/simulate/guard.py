"""Stops Python code of a dreamed episode that would touch the real world.

It checks Python's audit events, and wraps the few functions without one. Native code is not seen. The guard raises a
`BaseException` and keeps what it stopped: an episode whose code swallows even that still fails.
"""

import _posixsubprocess
import contextlib
import fcntl
import functools
import inspect
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from logging.handlers import RotatingFileHandler, TimedRotatingFileHandler
from multiprocessing.pool import Pool, ThreadPool
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from dreamgym_lg.simulate.allow import Allow
from dreamgym_lg.simulate.context import (
    Args,
    Blocked,
    ContextEpisode,
    Handler,
    Kwargs,
    Method,
    RealAccessBlocked,
    dispatch,
    guarded_episode,
    in_episode,
    is_collecting,
    patch_deferred,
    run_in,
)
from dreamgym_lg.user_code import frames, user_line, users_frame


class Guard:
    """The guard of one episode. Args: `on_blocked`, called at once with each access that it stops."""

    def __init__(self, allow: Allow, on_blocked: Callable[[Blocked], object]) -> None:
        self.allow, self._on_blocked = allow, on_blocked
        self.blocked: list[Blocked] = []

    def check(self, event: str, args: Sequence[Any]) -> None:
        """Raise `RealAccessBlocked` if an audit event would touch what is not allowed."""
        target = WATCHED[event](args, self.allow)
        if target is not None and (WATCHED[event] in NETWORK or not _is_of_the_process()):
            blocked = Blocked(event, target, user_line())
            self.blocked.append(blocked)
            self._on_blocked(blocked)
            raise RealAccessBlocked(blocked)


_MACHINE_MODULES = ("platform", "ctypes.util", "uuid", "distro", "multiprocessing.resource_tracker")
"""Modules that start programs and write temporary files for Python itself, to inspect the machine or to clean up."""


def _is_of_the_process() -> bool:
    """True if Python itself imports a package, caches bytecode or inspects the machine. It does so once."""
    for frame in frames():
        if users_frame(frame):
            return False
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module in _MACHINE_MODULES or (module, name) == ("tempfile", "_get_default_tempdir"):
            return True
        if frame.f_code.co_filename.startswith("<frozen importlib") and name == "_cache_bytecode":
            return True
        if name == "<module>" and frame.f_back and frame.f_back.f_code.co_filename.startswith("<frozen importlib"):
            return True
    return False


# --- checks: each returns the forbidden file, address or process that an event would touch ------------------------------------

Check = Callable[[Any, Allow], str | None]
"""(arguments of an audit event, what is allowed) -> the forbidden target; None if all is allowed."""


def _path(path: Any, allow: Allow, folder: int | None = None) -> str | None:
    """The path, if it is not allowed. Args: `folder`, descriptor of the folder to which the path is relative."""
    if path is None:
        return None
    if isinstance(path, int):
        open_path = _path_of(path)
        return None if open_path is None or allow.path(open_path) else open_path
    text = os.fsdecode(path)
    if folder is not None and folder >= 0:
        try:
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        except OSError:  # not Linux: the folder is unknown
            return text
    return None if allow.path(text) else text


def _path_of(number: int) -> str | None:
    """The path of an open file or folder; None for other descriptors and standard output."""
    status = os.fstat(number)
    if number <= 2 or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)) or not status.st_nlink:
        return None
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # not Linux
        return None


def _at(*places: tuple[int, int]) -> Check:
    """A check of paths. Args: pairs of the positions of a path and its folder in the event's arguments; 0: no folder."""

    def check(args: Any, allow: Allow) -> str | None:
        paths = (_path(args[path], allow, args[folder] if folder else None) for path, folder in places)
        return next(filter(None, paths), None)

    return check


def _opened(args: Any, allow: Allow) -> str | None:
    path, mode, flags, *folder = args
    writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND) if isinstance(flags, int) else 0
    return _path(path, allow, *folder) if writes or (isinstance(mode, str) and set(mode) & set("wax+")) else None


def _sqlite(args: Any, allow: Allow) -> str | None:
    text = os.fsdecode(args[0])
    path, _, options = text.removeprefix("file:").partition("?") if text.startswith("file:") else (text, "", "")
    if path in ("", ":memory:") or {"mode=ro", "mode=memory"} & set(options.split("&")):
        return None
    return _path(path, allow)


def _peer(args: Any, allow: Allow) -> str | None:
    """Checks the peer. The first argument is a socket, the last its peer's address, None for a connected one."""
    address = args[-1]
    if address is None:
        try:
            address = args[0].getpeername()
        except OSError:  # not connected: nothing can be sent
            return None
    if args[0].family in (socket.AF_INET, socket.AF_INET6):
        host, port = str(address[0]), address[1]
        return None if allow.host(host, port) else f"{host}:{port}"
    address = address or args[0].getsockname()
    if not address:  # an unnamed pair, by which event loops wake themselves
        return None
    text = os.fsdecode(address) if isinstance(address, str | bytes) else repr(address)
    return None if "\0" not in text and allow.path(text) else text


def _listening(args: Any, allow: Allow) -> str | None:
    """Checks the socket's own address; an unbound one listens at every address."""
    return _peer((args[0], args[0].getsockname()), allow)


def _sent(args: Any, allow: Allow) -> str | None:
    """Checks a write to a descriptor: a file, a socket's peer, or another process's pipe."""
    mode = os.fstat(args[0]).st_mode
    if stat.S_ISFIFO(mode):
        return None if args[0] <= 2 or _is_own_pipe(args[0]) else "a pipe"
    if not stat.S_ISSOCK(mode):
        return _path(args[0], allow)
    with socket.socket(fileno=os.dup(args[0])) as same:
        pair = same.family == socket.AF_UNIX and not (same.getpeername() or same.getsockname())
        return "a pair of sockets" if pair else _peer((same, None), allow)


def _is_own_pipe(number: int) -> bool:
    """True if this process holds the reading end of the pipe."""
    pipe = os.fstat(number)
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # closed by now
            is_same = os.path.samestat(os.fstat(int(name)), pipe)
            if is_same and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                return True
    return False


def _name(args: Any, allow: Allow) -> str | None:
    name = args[0].decode() if isinstance(args[0], bytes) else str(args[0])
    return None if args[0] is None or name == socket.gethostname() or allow.host(name, None) else name


def _reverse_name(args: Any, allow: Allow) -> str | None:
    return _name(args[0], allow)


def _signal(args: Any, allow: Allow) -> str | None:
    return _anything(args, allow) if args[1] else None  # signal 0 only asks whether the process is there


def _anything(args: Any, allow: Allow) -> str | None:
    return " ".join(str(arg) for arg in args[:2])[:120] or "the system"


WATCHED: dict[str, Check] = {
    "open": _opened,
    "sqlite3.connect": _sqlite,
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"), _peer),
    **dict.fromkeys(("socket.send", "socket.sendall", "socket.sendfile", "socket.write"), _peer),
    "socket.listen": _listening,
    **dict.fromkeys(("os.sendfile", "os.write", "os.writev", "os.pwrite", "os.pwritev", "os.posix_fallocate"), _sent),
    **dict.fromkeys(("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"), _name),
    "socket.getnameinfo": _reverse_name,
    **dict.fromkeys(("os.truncate", "os.setxattr", "os.removexattr", "os.mkfifo", "os.mknod"), _at((0, 0))),
    **dict.fromkeys(("os.remove", "os.rmdir", "shutil.rmtree"), _at((0, 1))),
    **dict.fromkeys(("os.mkdir", "os.chmod"), _at((0, 2))),
    **dict.fromkeys(("os.chown", "os.utime"), _at((0, 3))),
    **dict.fromkeys(("os.rename", "os.link"), _at((0, 2), (1, 3))),
    "os.symlink": _at((1, 2)),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"), _anything),
    **dict.fromkeys(("os.forkpty", "pty.spawn", "os.startfile", "webbrowser.open"), _anything),
    **dict.fromkeys(("os.kill", "os.killpg", "signal.pthread_kill", "signal.pidfd_send_signal"), _signal),
    **dict.fromkeys(("signal.raise_signal", "process.fork_exec", "process.start", "process.submit"), _anything),
    **dict.fromkeys(("shared_memory.open", "builtins.input", "syslog.syslog"), _anything),
    **dict.fromkeys(("socket.sethostname", "time.clock_settime", "time.clock_settime_ns"), _anything),
}
"""Audit event -> its check. `install_guard` adds events for functions without one."""

NETWORK = (_peer, _listening, _name, _reverse_name)
"""Checks of network access."""


# --- watching the process ---------------------------------------------------------------------------------------------------

_WITHOUT_EVENT: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (os, "os", ("sendfile", "write", "writev", "pwrite", "pwritev", "posix_fallocate")),
    (os, "os", ("mkfifo", "mknod")),
    (signal, "signal", ("raise_signal", "pidfd_send_signal")),
    (_posixsubprocess, "process", ("fork_exec",)),
    (time, "time", ("clock_settime", "clock_settime_ns")),
    (socket.socket, "socket", ("listen", "send", "sendall", "sendfile")),
    (ssl.SSLSocket, "socket", ("send", "sendall", "write")),
)
"""(owner, prefix of event names, functions) for which Python raises no audit event."""

_installed = False


def install_guard() -> None:
    """Install the audit hook and the wrappers; idempotent. An audit hook cannot be removed.

    Outside of guarded episodes an event costs one look-up in a dictionary.
    """
    global _installed
    if _installed:
        return
    _installed = True
    sys.addaudithook(_hook)
    for owner, event, names in _WITHOUT_EVENT:
        for name in names:
            if original := getattr(owner, name, None):  # some systems lack some
                setattr(owner, name, _with_event(f"{event}.{name}", original, connected=event == "socket"))
    setattr(os, "open", _wrap_os_open(os.open))  # noqa: B010
    setattr(signal, "signal", _wrap_signal(signal.signal))  # noqa: B010
    dispatch(BaseProcess, "start", _check_event("process.start"))
    dispatch(ProcessPoolExecutor, "submit", _check_event("process.submit"))
    dispatch(Pool, "_check_running", _submit_to_pool)  # called first by each of its methods
    dispatch(SharedMemory, "__init__", _check_event("shared_memory.open"))
    dispatch(logging.FileHandler, "__init__", _create_log)
    dispatch(logging.FileHandler, "_open", _open_log)
    for kind in (RotatingFileHandler, TimedRotatingFileHandler):
        dispatch(kind, "shouldRollover", lambda *_: False)  # a dream's records must not rotate the logs of production
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


def _wrap_os_open(original: Method) -> Method:
    """`os.open` with an event that has `dir_fd`, which Python's lacks."""

    @functools.wraps(original)
    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None and guarded_episode() is not None and not os.path.isabs(path):
            _hook("open", (path, None, flags, dir_fd))
            with in_episode(None):
                return int(original(path, flags, mode, dir_fd=dir_fd))
        return int(original(path, flags, mode, dir_fd=dir_fd))

    return opened


def _wrap_signal(original: Method) -> Method:
    """`signal.signal` whose handlers run in the episode that set them."""

    @functools.wraps(original)
    def signal_(number: int, handler: Any) -> Any:
        episode = guarded_episode()
        if episode is None or episode.guard is None or not callable(handler) or isinstance(handler, signal.Handlers):
            return original(number, handler)
        return original(number, lambda *args: run_in(episode, handler, *args))

    return signal_


def _check_event(event: str) -> Handler:
    def check(episode: ContextEpisode, original: Method, owner: Any, args: Args, kwargs: Kwargs) -> Any:
        _hook(event, args or (owner,))
        return original(owner, *args, **kwargs)

    return check


def _submit_to_pool(episode: ContextEpisode, original: Method, pool: Pool, args: Args, kwargs: Kwargs) -> None:
    if not isinstance(pool, ThreadPool):
        _hook("process.submit", (pool,))
    original(pool)


_DREAMED_LOG = "_dreamgym_dreamed"
"""Attribute of a `FileHandler` that an episode created."""


def _create_log(episode: ContextEpisode, original: Method, handler: Any, args: Args, kwargs: Kwargs) -> None:
    setattr(handler, _DREAMED_LOG, True)
    original(handler, *args, **kwargs)


def _open_log(episode: ContextEpisode, original: Method, handler: Any, args: Args, kwargs: Kwargs) -> Any:
    """Let production's handlers open their file at the first record. An episode's are guarded."""
    return run_in(episode if hasattr(handler, _DREAMED_LOG) else None, original, handler, *args, **kwargs)
