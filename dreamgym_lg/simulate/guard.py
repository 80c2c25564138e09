"""The guard: while a dreamed episode is active, what would touch the real world raises. It fails closed.

Python's audit events tell of it before it happens. What is raised is no `Exception`, so that `except Exception` does not get past
it; and what was stopped is kept, so that code which swallows even that still fails its episode.
"""

import os
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dreamgym_lg.simulate.context import active, entered
from dreamgym_lg.simulate.walk import LIBRARIES


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

    def __init__(self, blocked: Blocked) -> None:
        super().__init__(
            f"a dreamed episode must not touch the real world: {blocked}; allow it with allow=, or pass the tool through"
        )
        self.blocked = blocked


@dataclass(frozen=True)
class Allow:
    """What episodes may touch all the same."""

    hosts: Sequence[str] = ()
    """`host` or `host:port`, names or addresses."""
    paths: Sequence[str | Path] = ()
    """Files, or folders with all they hold, that may be written."""
    _resolved: dict[str, set[str]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _roots(self) -> list[str]:
        return [os.path.realpath(path) for path in self.paths]

    def path(self, path: str) -> bool:
        real = os.path.realpath(path)
        if real in (os.devnull, "/dev/tty") or "__pycache__" in real.split(os.sep):
            return True  # the import system caches what it compiles
        return any(real == root or real.startswith(root + os.sep) for root in self._roots)

    def host(self, host: str, port: int | None) -> bool:
        for allowed in self.hosts:
            name, _, wanted = allowed.partition(":") if allowed.count(":") == 1 else (allowed, "", "")
            if wanted and port is not None and str(port) != wanted:
                continue
            if host == name or (port is not None and host in self._addresses(name)):
                return True
        return False

    def _addresses(self, name: str) -> set[str]:
        if name not in self._resolved:
            with entered(None):
                try:
                    self._resolved[name] = {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
                except OSError:
                    self._resolved[name] = set()
        return self._resolved[name]


def _opened(args: Any, allow: Allow) -> str | None:
    path, mode, flags = args
    if isinstance(path, int):
        return None
    writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND) if isinstance(flags, int) else 0
    if not (writes or (isinstance(mode, str) and set(mode) & set("wax+"))):
        return None
    return _path(path, allow)


def _path(path: Any, allow: Allow) -> str | None:
    if isinstance(path, int) or path is None:
        return None
    text = os.fsdecode(path)
    return None if allow.path(text) else text


def _paths(args: Any, allow: Allow) -> str | None:
    return next((found for found in (_path(path, allow) for path in args[:2] if not isinstance(path, int)) if found), None)


def _first(args: Any, allow: Allow) -> str | None:
    return _path(args[0], allow)


def _sqlite(args: Any, allow: Allow) -> str | None:
    text = os.fsdecode(args[0])
    if text in ("", ":memory:") or ":memory:" in text or "mode=ro" in text or "mode=memory" in text:
        return None
    return _path(text.removeprefix("file:").split("?")[0], allow)


def _address(args: Any, allow: Allow) -> str | None:
    return _peer(args[-1], allow)


def _peer(address: Any, allow: Allow) -> str | None:
    if not isinstance(address, tuple):  # a Unix socket's path
        text = os.fsdecode(address) if isinstance(address, str | bytes) else repr(address)
        return None if allow.path(text) else text
    host, port = str(address[0]), address[1]
    return None if allow.host(host, port) else f"{host}:{port}"


def _name(args: Any, allow: Allow) -> str | None:
    name = args[0].decode() if isinstance(args[0], bytes) else str(args[0])
    return None if allow.host(name, None) else name


def _anything(args: Any, allow: Allow) -> str | None:
    return " ".join(str(arg) for arg in args[:2])[:120] or "the system"


WATCHED: dict[str, Callable[[Any, Allow], str | None]] = {
    "open": _opened,
    "sqlite3.connect": _sqlite,
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"), _address),
    **dict.fromkeys(("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"), _name),
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), _first),
    **dict.fromkeys(("os.setxattr", "os.removexattr", "shutil.rmtree", "os.mkfifo", "os.mknod"), _first),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), _paths),
    **dict.fromkeys(
        ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn",
         "os.startfile", "os.kill", "os.killpg", "webbrowser.open", "builtins.input"), _anything,
    ),
}  # fmt: skip
"""Audit event -> what of its arguments is forbidden, or None."""


def _hook(event: str, args: Any) -> None:
    check = WATCHED.get(event)
    if check is None or (episode := active()) is None or not episode.guarded:
        return
    if (target := check(args, episode.allow)) is not None:
        _stop(episode, event, target)


def _stop(episode: Any, event: str, target: str) -> None:
    blocked = Blocked(event, target, _user_frame())
    episode.blocked.append(blocked)
    raise RealAccessBlocked(blocked)


_OURS = str(Path(__file__).parents[1])


def _user_frame() -> str:
    """The innermost line that is neither Python's, nor a package's, nor ours."""
    frame = sys._getframe(2)
    last = "an unknown place"
    while frame is not None:
        file = frame.f_code.co_filename
        last = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        if not file.startswith((*LIBRARIES, _OURS, "<")):
            return last
        frame = frame.f_back  # type: ignore[assignment]
    return last


_installed = False


def install() -> None:
    """An audit hook cannot be taken off again, so it is set once; without an episode it is a dictionary look-up."""
    global _installed
    if _installed:
        return
    _installed = True
    sys.addaudithook(_hook)
    for cls, names in ((socket.socket, ("send", "sendall", "sendfile")), (ssl.SSLSocket, ("send", "sendall", "write"))):
        for name in names:
            setattr(cls, name, _guarded_send(name, getattr(cls, name)))


def _guarded_send(name: str, original: Any) -> Any:
    """Sending on a connection that was open before the episode is no audit event."""

    def send(self: socket.socket, *args: Any, **kwargs: Any) -> Any:
        episode = active()
        if episode is not None and episode.guarded and self.family in (socket.AF_INET, socket.AF_INET6):
            try:
                target = _peer(self.getpeername(), episode.allow)
            except OSError:  # not connected: nothing can be sent
                target = None
            if target is not None:
                _stop(episode, f"socket.{name}", target)
        return original(self, *args, **kwargs)

    return send
