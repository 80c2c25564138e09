"""The hosts and paths that a dreamed episode may touch."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.context import in_episode

_HARMLESS_FILES = (os.devnull, "/dev/tty", "/dev/stdout", "/dev/stderr")


@dataclass(frozen=True)
class Allow:
    """The real hosts and paths that dreamed episodes may touch."""

    hosts: Sequence[str] = ()
    """`host` or `host:port`; a host is a name or an address, in brackets if it has colons (`[::1]:80`)."""
    paths: Sequence[str | Path] = ()
    """Files and folders (with all in them) that may be written. For a SQLite file give its folder, for the journal."""
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
        """True if a path may be written."""
        real = os.path.realpath(path)
        if path in _HARMLESS_FILES or real in _HARMLESS_FILES:
            return True
        return any(real == root or real.startswith(os.path.join(root, "")) for root in self._roots)

    def host(self, host: str, port: int | None) -> bool:
        """True if a host may be connected to, or, with `port=None`, be resolved."""
        for allowed in self.hosts:
            name, allowed_port = host_and_port(allowed)
            if allowed_port and port is not None and str(port) != allowed_port:
                continue
            if host == name or (port is not None and self._is_address(name, host)):
                return True
        return False

    def _is_address(self, name: str, address: str) -> bool:
        """True if a name resolves to the address. It is resolved again for each new address: servers take turns."""
        addresses = self._resolved.setdefault(name, set())
        if address not in addresses:
            with in_episode(None):
                try:
                    addresses |= {str(peer[0]) for *_, peer in socket.getaddrinfo(name, None)}
                except OSError:
                    return False
        return address in addresses


def host_and_port(host: str) -> tuple[str, str]:
    """The host and port of an `Allow.hosts` entry; port "" means all. `[::1]:80` has a port, `::1` has none."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name, port.removeprefix(":")
    name, _, port = host.partition(":") if host.count(":") == 1 else (host, "", "")
    return name, port
