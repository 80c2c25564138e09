"""Starts programs behind the wall of `kernel.py`, and checks if this machine can build it.

Outside of the scratch folder and what `Allow` names, nothing is written, created, removed or changed. No socket is opened, and
no signal, message or shared memory reaches other processes. All files but hidden databases can be read, and locked while the
process lives. In scratch, changing modes does nothing; changing owners, times and attributes fails. No GPU can be used.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.allow import Allow, host_and_port
from dreamgym_lg.simulate.wall import kernel

Isolation = Literal["process", "guard"]
"""What keeps dreamed episodes from the real world: the kernel, in worker processes, or a guard in this process."""

GUARD_LIMITS = (
    "stops Python code in this process, but not native code (pyarrow, torch.save, duckdb, grpc, psycopg, ctypes, uvloop), nor "
    "what goes to files, connections and threads that were there before"
)
"""What `isolation="guard"` cannot promise."""

_DNS = 53


def missing_for_wall() -> list[str]:
    """Requirements of the wall that this machine lacks, in words."""
    if sys.platform != "linux":
        return [f"Linux (this is {sys.platform})"]
    missing = []
    if not kernel.landlock_abi():
        why = f"not built in, switched off, or kept back by a container; Linux {platform.release()}"
        missing.append(f"Landlock, of Linux 5.13 or later (here: {why})")
    if not kernel.has_seccomp():
        missing.append("seccomp filters (not built in, or kept back by a container)")
    if platform.machine() not in kernel.MACHINES:
        missing.append(f"a machine of {', '.join(kernel.MACHINES)} (this is {platform.machine()})")
    return missing


def limits_of_wall() -> list[str]:
    """Additional limits of the wall on this kernel, in words."""
    abi, limits = kernel.landlock_abi(), []
    if abi < kernel.LANDLOCK_PORTS:
        limits.append("before Linux 6.7, native code can connect to every port once allow= names a host")
    if abi < kernel.LANDLOCK_SCOPES:
        limits.append("before Linux 6.12, a process there signals itself alone, and not those that it starts")
    if abi < 2:
        limits.append("before Linux 5.19, files are not moved between folders")
    return limits


def promises_of(isolation: Isolation) -> str:
    """A sentence on what an isolation guarantees on this machine."""
    if isolation == "guard":
        return f"Dreamed episodes run under a guard, which {GUARD_LIMITS}."
    but = "".join(f"; {each}" for each in limits_of_wall())
    return (
        "Dreamed episodes run behind a wall of the kernel: nothing outside a scratch folder and what allow= names is written, "
        f"and no socket but to its hosts is opened, by native code but to its hosts' ports, at any host{but}."
    )


def check_wall() -> None:
    """Raise `ConfigurationError`, which names what is missing, if this machine cannot build the wall."""
    if missing := missing_for_wall():
        raise ConfigurationError(
            f"isolation='process' needs {'; and '.join(missing)}. Use a machine that has it, or choose isolation='guard' by "
            f"name (--isolation guard): it {GUARD_LIMITS}"
        )


def start_walled(
    command: Sequence[str | Path],
    *,
    scratch: Path | None,
    allow: Allow | None = None,
    hidden: Collection[Path] = (),
    children: bool = True,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> "subprocess.Popen[bytes]":
    """Start a program behind the wall, as are its children. This takes about 50 ms.

    Args:
        command: The program's absolute path, then its arguments.
        scratch: The folder that it may write, its `TMPDIR`. None: it writes nothing.
        allow: More paths that may be written; and hosts. TCP clients may connect to their ports (at any address, since the
            kernel knows no names; without a port to all) and to port 53 to resolve names. Nothing may listen.
        hidden: SQLite files that it cannot open.
        children: True if it may start processes.
        env, options: As of `subprocess.Popen`.

    Raises `ConfigurationError` if this machine cannot build the wall, and for an invalid `allow`. If the kernel still refuses,
    the process ends with status 1 and the reason on its standard error.
    """
    check_wall()
    allow = allow or Allow()
    scratch_paths = [] if scratch is None else [os.path.realpath(scratch)]
    environment = {**(os.environ if env is None else env), **({"TMPDIR": scratch_paths[0]} if scratch_paths else {})}
    if allow.hosts:
        environment["RES_OPTIONS"] = f"{environment.get('RES_OPTIONS', '')} use-vc".strip()
    writable = [*scratch_paths, *_writable(allow, hidden)]
    unreadable = [f"{os.path.realpath(path)}{end}" for path in hidden for end in ("", "-wal", "-shm", "-journal")]
    arguments: dict[str, Any] = {"writable": writable, "hidden": unreadable, "ports": _ports(allow)}
    arguments |= {"children": children, "abi": kernel.landlock_abi()}
    launcher = [sys.executable, "-I", "-S", kernel.__file__, json.dumps(arguments), *map(str, command)]
    return subprocess.Popen(launcher, env=environment, **options)


def check_allowed(allow: Allow) -> None:
    """Raise `ConfigurationError` for a path that does not exist, and an invalid port."""
    _writable(allow), _ports(allow)


def _writable(allow: Allow, hidden: Collection[Path] = ()) -> list[str]:
    for path in allow.paths:
        if database := next((each for each in hidden if each.resolve().is_relative_to(os.path.realpath(path))), None):
            raise ConfigurationError(f"{str(path)!r} holds {database}, which no agent may read: allow a folder beside it")
        if not os.path.exists(path):
            raise ConfigurationError(
                f"{str(path)!r} does not exist, and the kernel allows only what does: create it, or allow its folder"
            )
    return [os.path.realpath(path) for path in allow.paths]


def _ports(allow: Allow) -> list[int] | None:
    """The ports of the allowed hosts; None for every port."""
    ports = set()
    for host in allow.hosts:
        name, port = host_and_port(host)
        if not port:
            return None
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigurationError(f"Allow(hosts=[{host!r}]): {port!r} is no port; give a number, 1 to 65535")
        ports |= {int(port)} if ":" in name or name.replace(".", "").isdecimal() else {int(port), _DNS}
    return sorted(ports)
