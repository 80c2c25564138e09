"""The hosts and paths that a dreamed episode may touch all the same."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.context import in_episode

_NOWHERE = (os.devnull, "/dev/tty", "/dev/stdout", "/dev/stderr")


@dataclass(frozen=True)
class Allow:
    """The hosts and paths that episodes may touch all the same."""

    hosts: Sequence[str] = ()
    """`host` or `host:port`, names or addresses; `[::1]:80` for those with colons."""
    paths: Sequence[str | Path] = ()
    """Files, or folders with all they hold, that may be written. For a SQLite file its folder, where its journal goes."""
    _resolved: dict[str, set[str]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("hosts", self.hosts), ("paths", self.paths)):
            if isinstance(value, str | Path):
                raise ConfigurationError(f"Allow({name}={value!r}): give a list; of a text, each letter would be allowed")
        for host in self.hosts:
            if "/" in host:
                raise ConfigurationError(
                    f"Allow(hosts=[{host!r}]): a host has no '/', nor are paths of one allowed; give 'host' or 'host:port'"
                )

    @cached_property
    def _roots(self) -> list[str]:
        return [os.path.realpath(path) for path in self.paths]

    def path(self, path: str) -> bool:
        real = os.path.realpath(path)
        if path in _NOWHERE or real in _NOWHERE:
            return True
        return any(real == root or real.startswith(os.path.join(root, "")) for root in self._roots)

    def host(self, host: str, port: int | None) -> bool:
        """Tells if a host may be connected to; without a port, looked up."""
        for allowed in self.hosts:
            name, allowed_port = host_and_port(allowed)
            if allowed_port and port is not None and str(port) != allowed_port:
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
                    known |= {str(address[0]) for *_, address in socket.getaddrinfo(name, None)}
                except OSError:
                    return False
        return address in known


def host_and_port(host: str) -> tuple[str, str]:
    """A host of `Allow` and its port, "" for every port. `[::1]:80` is an address with one, `::1` without."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name, port.removeprefix(":")
    name, _, port = host.partition(":") if host.count(":") == 1 else (host, "", "")
    return name, port
