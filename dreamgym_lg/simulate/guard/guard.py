"""The guard: while a dreamed episode is active, what would touch the real world raises. It fails closed.

Python raises an audit event before it happens; the few functions without one are wrapped. What the guard raises is no
`Exception`, so that `except Exception` does not get past it; and what was stopped is kept, so that code which swallows even
that still fails its episode. Not seen: files and databases that were open before, C libraries with sockets of their own.
"""

import functools
import logging
import os
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.context import ActiveEpisode, active, in_episode
from dreamgym_lg.simulate.dispatch import Args, Handler, Kwargs, Method, dispatch
from dreamgym_lg.simulate.guard.finalizers import patch_finalizers
from dreamgym_lg.simulate.guard.frames import is_of_the_process, user_line


class Blocked(NamedTuple):
    """One real access that was stopped."""

    event: str
    """Python's name of it, e.g. `socket.connect`."""
    target: str
    where: str
    """The user's own line that led to it."""

    def __str__(self) -> str:
        return f"{self.event} of {self.target} at {self.where}"


class RealAccessBlocked(BaseException):
    """Raised at the place of a real access inside a dream; a `BaseException`, because users write `except Exception`."""

    def __init__(self, *blocked: Blocked) -> None:
        told = "; ".join(map(str, blocked[:3]))
        super().__init__(f"a dreamed episode must not touch the real world: {told}; allow it with allow=, or simulate it")
        self.blocked = blocked


_NOWHERE = (os.devnull, "/dev/tty", "/dev/stdout", "/dev/stderr")


@dataclass(frozen=True)
class Allow:
    """What episodes may touch all the same."""

    hosts: Sequence[str] = ()
    """`host` or `host:port`, names or addresses."""
    paths: Sequence[str | Path] = ()
    """Files, or folders with all they hold, that may be written."""
    _resolved: dict[str, set[str]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, given in (("hosts", self.hosts), ("paths", self.paths)):
            if isinstance(given, str | Path):
                raise ConfigurationError(f"Allow({name}={given!r}): give a list; of a text, each letter would be allowed")

    @cached_property
    def _roots(self) -> list[str]:
        return [os.path.realpath(path) for path in self.paths]

    def path(self, path: str) -> bool:
        real = os.path.realpath(path)
        if path in _NOWHERE or real in _NOWHERE:
            return True
        return any(real == root or real.startswith(os.path.join(root, "")) for root in self._roots)

    def host(self, host: str, port: int | None) -> bool:
        """Without a port it is asked whether the name may be looked up."""
        for allowed in self.hosts:
            name, _, wanted = allowed.partition(":") if allowed.count(":") == 1 else (allowed, "", "")
            if wanted and port is not None and str(port) != wanted:
                continue
            if host == name or (port is not None and self._is_address(name, host)):
                return True
        return False

    def _is_address(self, name: str, address: str) -> bool:
        """Names are looked up again for an address not seen before: their servers take turns."""
        known = self._resolved.setdefault(name, set())
        if address not in known:
            with in_episode(None):
                try:
                    known |= {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
                except OSError:
                    return False
        return address in known


Check = Callable[[Any, Allow], str | None]
"""Of an audit event's arguments: what is forbidden, or None."""


def _path(path: Any, allow: Allow, folder: int | None = None) -> str | None:
    """`folder` is the number of an open folder that a relative path is meant in."""
    if isinstance(path, int) or path is None:  # opened before, and checked then
        return None
    text = os.fsdecode(path)
    if folder is not None and folder >= 0:
        try:
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        except OSError:  # not Linux: where it lies is unknown
            return text
    return None if allow.path(text) else text


def _at(*places: tuple[int, int]) -> Check:
    """The arguments at these places are paths; the second number is where the folder's stands, 0 for nowhere."""

    def check(args: Any, allow: Allow) -> str | None:
        found = (_path(args[path], allow, args[folder] if folder else None) for path, folder in places)
        return next((path for path in found if path), None)

    return check


def _opened(args: Any, allow: Allow) -> str | None:
    path, mode, flags = args
    writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND) if isinstance(flags, int) else 0
    return _path(path, allow) if writes or (isinstance(mode, str) and set(mode) & set("wax+")) else None


def _sqlite(args: Any, allow: Allow) -> str | None:
    text = os.fsdecode(args[0])
    path, _, options = text.removeprefix("file:").partition("?") if text.startswith("file:") else (text, "", "")
    if path in ("", ":memory:") or {"mode=ro", "mode=memory"} & set(options.split("&")):
        return None
    return _path(path, allow)


def _peer(args: Any, allow: Allow) -> str | None:
    """A socket first; its peer's address last, or None if it is connected."""
    address = args[-1]
    if address is None:
        try:
            address = args[0].getpeername()
        except OSError:  # not connected: nothing can be sent
            return None
    if args[0].family in (socket.AF_INET, socket.AF_INET6):
        host, port = str(address[0]), address[1]
        return None if allow.host(host, port) else f"{host}:{port}"
    if args[-1] is None:  # talking to a process of this machine: also how event loops wake themselves
        return None
    text = os.fsdecode(address) if isinstance(address, str | bytes) else repr(address)
    return None if allow.path(text) else text


def _sent(args: Any, allow: Allow) -> str | None:
    """The number of an open file first; if it is a socket's, its peer counts."""
    if not stat.S_ISSOCK(os.fstat(args[0]).st_mode):
        return None
    with socket.socket(fileno=os.dup(args[0])) as same:
        return _peer((same, None), allow)


def _name(args: Any, allow: Allow) -> str | None:
    name = args[0].decode() if isinstance(args[0], bytes) else str(args[0])
    return None if args[0] is None or name == socket.gethostname() or allow.host(name, None) else name


def _signal(args: Any, allow: Allow) -> str | None:
    return _anything(args, allow) if args[1] else None  # signal 0 only asks whether the process is there


def _anything(args: Any, allow: Allow) -> str | None:
    return " ".join(str(arg) for arg in args[:2])[:120] or "the system"


WATCHED: dict[str, Check] = {
    "open": _opened,
    "sqlite3.connect": _sqlite,
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"), _peer),
    **dict.fromkeys(("socket.send", "socket.sendall", "socket.sendfile", "socket.write"), _peer),
    **dict.fromkeys(("os.sendfile", "os.write", "os.writev"), _sent),
    **dict.fromkeys(("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"), _name),
    **dict.fromkeys(("os.truncate", "os.setxattr", "os.removexattr", "os.mkfifo", "os.mknod"), _at((0, 0))),
    **dict.fromkeys(("os.remove", "os.rmdir", "shutil.rmtree"), _at((0, 1))),
    **dict.fromkeys(("os.mkdir", "os.chmod"), _at((0, 2))),
    **dict.fromkeys(("os.chown", "os.utime"), _at((0, 3))),
    **dict.fromkeys(("os.rename", "os.link"), _at((0, 2), (1, 3))),
    "os.symlink": _at((1, 2)),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"), _anything),
    **dict.fromkeys(("os.forkpty", "pty.spawn", "os.startfile", "webbrowser.open"), _anything),
    **dict.fromkeys(("os.kill", "os.killpg"), _signal),
    **dict.fromkeys(("builtins.input", "process.start", "process.submit"), _anything),
}
"""Audit event -> its check. What Python raises no event for, `install_guard` wraps and names likewise."""

_NETWORK = (_peer, _sent, _name)

_WITHOUT_EVENT: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (os, "os", ("sendfile", "write", "writev", "mkfifo", "mknod")),
    (socket.socket, "socket", ("send", "sendall", "sendfile")),
    (ssl.SSLSocket, "socket", ("send", "sendall", "write")),
)
"""Owner, its name in events, and functions of which Python raises no audit event."""


class Guard:
    """The guard of one episode: what it allows, and what it stopped."""

    def __init__(self, allow: Allow) -> None:
        self.allow = allow
        self.blocked: list[Blocked] = []

    def check(self, event: str, args: Sequence[Any]) -> None:
        """Raise `RealAccessBlocked` if this audit event would touch what is not allowed."""
        target = WATCHED[event](args, self.allow)
        if target is not None and not is_of_the_process(network=WATCHED[event] in _NETWORK):
            blocked = Blocked(event, target, user_line())
            self.blocked.append(blocked)
            raise RealAccessBlocked(blocked)


def _hook(event: str, args: Sequence[Any]) -> None:
    if event in WATCHED and (episode := active()) is not None and episode.guard is not None:
        episode.guard.check(event, args)


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
    dispatch(BaseProcess, "start", _start_or_submit("process.start"))
    dispatch(ProcessPoolExecutor, "submit", _start_or_submit("process.submit"))
    dispatch(logging.Handler, "handle", _handle_record)
    patch_finalizers()


def _with_event(event: str, original: Method, *, connected: bool) -> Method:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if active() is not None:
            _hook(event, (args[0], None) if connected else args)
        return original(*args, **kwargs)

    return function


def _start_or_submit(event: str) -> Handler:
    def start(episode: ActiveEpisode, original: Method, owner: Any, args: Args, kwargs: Kwargs) -> Any:
        _hook(event, args or (owner,))
        return original(owner, *args, **kwargs)

    return start


def _handle_record(episode: ActiveEpisode, original: Method, handler: Any, args: Args, kwargs: Kwargs) -> Any:
    """A log's own files are opened late and rolled over: no doing of the agent's. Logs that go elsewhere are stopped."""
    with in_episode(None if isinstance(handler, logging.FileHandler) else episode):
        return original(handler, *args, **kwargs)
