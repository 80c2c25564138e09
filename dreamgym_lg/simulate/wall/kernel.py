"""Puts a process behind a wall of the Linux kernel. It writes only named folders, and reads no hidden file.

It needs only the standard library, since it runs as a script: `kernel.py OPTIONS COMMAND...` builds the wall and executes the
command, whose children are behind it too, without root. Landlock restricts paths, TCP ports and signals; a seccomp filter
all else, and what this kernel's Landlock lacks.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

LANDLOCK_PORTS, LANDLOCK_SCOPES = 4, 6
"""First Landlock versions with TCP ports (Linux 6.7) and signals (Linux 6.12). Version 1 is of Linux 5.13."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, function: str, *args: object) -> int:
    """Call a function of the C library. Raises `OSError`, which names `what`, if it fails."""
    values = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result: int = getattr(_libc, function)(*values)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


# --- Landlock: linux/landlock.h --------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every machine

_WRITE_FILE, _READ_FILE, _TRUNCATE = 1 << 1, 1 << 2, 1 << 14
_MAKE_DEVICES = 1 << 6 | 1 << 11
_WRITES = sum(1 << bit for bit in (1, *range(4, 16)))
"""All rights but execute and read: write, remove, create, move between folders, truncate, device commands."""
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPES = 1 | 2
"""No abstract unix sockets of, and no signals to, processes outside."""


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 if it has none, or it is switched off."""
    abi: int = _libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_long(0), ctypes.c_long(1))
    return max(abi, 0)


def _landlock(writable: Sequence[str], hidden: Sequence[str], ports: Sequence[int] | None, abi: int) -> None:
    files = _WRITES & (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1 | (_READ_FILE if hidden else 0)
    network = _BIND_TCP | (_CONNECT_TCP if ports is not None else 0)
    attributes = struct.pack("Q", files)
    attributes += struct.pack("Q", network) if abi >= LANDLOCK_PORTS else b""
    attributes += struct.pack("Q", _SCOPES) if abi >= LANDLOCK_SCOPES else b""
    rules = _call("Landlock", "syscall", _CREATE_RULESET, attributes, len(attributes), 0)
    for path in writable:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = files & (~_MAKE_DEVICES if os.path.isdir(path) else _WRITE_FILE | _READ_FILE | _TRUNCATE)
        _call(f"Landlock rule of {path}", "syscall", _ADD_RULE, rules, 1, struct.pack("=Qi", rights, folder), 0)
        os.close(folder)
    for number in _readable(hidden):
        _call("Landlock rule to read", "syscall", _ADD_RULE, rules, 1, struct.pack("=Qi", _READ_FILE, number), 0)
    for port in (ports or ()) if abi >= LANDLOCK_PORTS else ():
        _call(f"Landlock rule of port {port}", "syscall", _ADD_RULE, rules, 2, struct.pack("QQ", _CONNECT_TCP, port), 0)
    _call("Landlock", "syscall", _RESTRICT_SELF, rules, 0)
    os.close(rules)


def _readable(hidden: Sequence[str]) -> Iterator[int]:
    """Descriptors of what may be read: siblings of hidden files and of their parents. No links."""
    parents = {path[:end] or "/" for path in hidden for end, letter in enumerate(path) if letter == "/"}
    closed = {os.stat(path)[1:3] for path in (*hidden, *parents) if os.path.exists(path)}  # inode and device
    for folder in parents:
        for name in os.listdir(folder) if os.access(folder, os.R_OK) else ():
            with contextlib.suppress(OSError):  # removed meanwhile, or not accessible
                number = os.open(os.path.join(folder, name), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                status = os.fstat(number)
                if not stat.S_ISLNK(status.st_mode) and status[1:3] not in closed:  # a rule covers all below
                    yield number
                os.close(number)


# --- seccomp: linux/seccomp.h, linux/filter.h ------------------------------------------------------------------------------

_LOAD, _AND, _EQUAL, _GREATER, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NEWEST_CALL = 469
"""`file_setattr` of Linux 6.17. Later, unreviewed calls fail behind the wall as on an older kernel."""
_NAMESPACES, _THREAD = 0x7E020000, 0x10000
_FAST_OPEN = 0x20000000
"""MSG_FASTOPEN, which sends without `connect` and so bypasses Landlock."""
_TYPE = 0xF
"""Mask of a socket's type without flags."""
_COMMANDS = {
    **{"TCGETS": 0x5401, "TCGETS2": 0x802C542A, "TIOCGPGRP": 0x540F, "TIOCGWINSZ": 0x5413, "FIONREAD": 0x541B},
    **{"FIONBIO": 0x5421, "FIONCLEX": 0x5450, "FIOCLEX": 0x5451, "FIOASYNC": 0x5452},
    **{"FS_IOC_GETFLAGS": 0x80086601, "FS_IOC_FIEMAP": 0xC020660B},
    **{"FICLONE": 0x40049409, "FICLONERANGE": 0x4020940D},  # into a file that is open for writing
}
"""Allowed `ioctl` commands, which only read or change a descriptor."""
_FCNTL_COMMANDS = (*range(8), 9, 11, 36, 37, 38, 1025, *range(1030, 1036), 1037, 1039, 1040)
"""Allowed `fcntl` commands: not leases (1024), change notices (1026), file hints (1036, 1038) and signals (8, 10, 15)."""

Unless = tuple[tuple[int, int, Collection[int]], ...]
"""((argument number, mask, values), ...): the call is allowed if each argument, masked, is one of its values."""


class Rule(NamedTuple):
    """System calls that fail with `error`, `unless` their arguments are harmless. With error 0 they do nothing."""

    calls: str
    error: int = errno.EPERM
    unless: Unless = ()


_OWN = ((0, 0xFFFFFFFF, (0,)),)
"""The calling process, whose id may be given as 0."""

RULES = (
    Rule("chmod fchmod fchmodat fchmodat2", 0),  # ignored, so that `shutil.copy` works
    Rule("chown fchown lchown fchownat utime utimes utimensat futimesat file_setattr"),
    Rule("setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat"),
    Rule("shmget shmat shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open mq_unlink"),
    Rule("add_key request_key keyctl unshare setns bpf open_by_handle_at"),
    Rule("io_uring_setup io_uring_enter io_uring_register", errno.ENOSYS),  # would bypass the other rules
    Rule("io_setup", errno.EAGAIN),  # limited per machine
    Rule("inotify_init inotify_init1 fanotify_init", errno.EMFILE),  # limited per user
    Rule("clone3", errno.ENOSYS),  # a filter cannot read its flags; the C library then uses `clone`
    Rule("clone", unless=((0, _NAMESPACES, (0,)),)),
    Rule("ioctl", unless=((1, 0xFFFFFFFF, _COMMANDS.values()),)),
    Rule("fcntl", unless=((1, 0xFFFFFFFF, _FCNTL_COMMANDS),)),
    Rule("setpriority", unless=((0, 0xFFFFFFFF, (0,)), (1, 0xFFFFFFFF, (0,)))),
    Rule("ioprio_set", unless=((0, 0xFFFFFFFF, (1,)), (1, 0xFFFFFFFF, (0,)))),
    Rule("prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr", unless=_OWN),
    Rule("socketpair", errno.EACCES, ((1, _TYPE, (1, 5)),)),  # SOCK_STREAM, SOCK_SEQPACKET: only connected pairs
)

_NO_CHILDREN = (  # RLIMIT_NPROC does not apply to root
    Rule("fork vfork", errno.EAGAIN),
    Rule("clone", errno.EAGAIN, ((0, _NAMESPACES | _THREAD, (_THREAD,)),)),
)
_NO_SOCKETS = (Rule("socket", errno.EACCES),)
_TCP_CLIENTS = (
    Rule("socket", errno.EACCES, ((0, 0xFFFFFFFF, (2, 10)), (1, _TYPE, (1,)), (2, 0xFFFFFFFF, (0, 6)))),  # AF_INET, AF_INET6
    Rule("listen", errno.EACCES),
    Rule("sendto", errno.EACCES, ((3, _FAST_OPEN, (0,)),)),
    Rule("sendmsg", errno.EACCES, ((2, _FAST_OPEN, (0,)),)),
    Rule("sendmmsg", errno.EACCES, ((3, _FAST_OPEN, (0,)),)),
)

_WITHOUT_TRUNCATE = (
    Rule("truncate"),
    Rule("open", unless=((1, 0o1003, (0, 1, 2, 3, 0o1001, 0o1002)),)),  # O_TRUNC without writing
    Rule("openat", unless=((2, 0o1003, (0, 1, 2, 3, 0o1001, 0o1002)),)),
    Rule("openat2", errno.ENOSYS),
)


def _without_scopes() -> tuple[Rule, ...]:
    """Rules that allow signals only to this process and its group."""
    own = (0, 0xFFFFFFFF, (0, os.getpid(), 2**32 - os.getpid()))
    return (Rule("kill tgkill rt_sigqueueinfo rt_tgsigqueueinfo", unless=(own,)), Rule("tkill pidfd_send_signal"))


MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> (architecture in linux/audit.h, column in `NUMBERS`)."""

NUMBERS: dict[str, tuple[int | None, int | None]] = {
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54)},
    **{"utime": (132, None), "utimes": (235, None), "utimensat": (280, 88), "futimesat": (261, None)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466)},
    **{"file_setattr": (469, 469), "ioctl": (16, 29), "open_by_handle_at": (304, 265)},
    **{"shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "mq_open": (240, 180), "mq_unlink": (241, 181)},
    **{"semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191)},
    **{"msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)},
    **{"fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435), "unshare": (272, 97)},
    **{"setpriority": (141, 140), "ioprio_set": (251, 30), "prlimit64": (302, 261), "sched_setaffinity": (203, 122)},
    **{"sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274)},
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_send_signal": (424, 424)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "fcntl": (72, 25), "truncate": (76, 45)},
    **{"inotify_init": (253, None), "inotify_init1": (294, 26), "open": (2, None), "openat": (257, 56), "openat2": (437, 437)},
    **{"io_setup": (206, 0), "fanotify_init": (300, 262)},
    **{"setns": (308, 268), "socket": (41, 198), "socketpair": (53, 199), "listen": (50, 201)},
    **{"sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269)},
}
"""System call -> its number on each of `MACHINES`; None if the machine lacks it."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction of the filter. Args: `then` and `otherwise`, instructions that a comparison skips."""
    return struct.pack("HBBI", code, then, otherwise, value)


def _rule(number: int, rule: Rule) -> list[bytes]:
    """The instructions of a rule for one system call, which other calls skip."""
    fail, body = _step(_RETURN, _FAIL | rule.error), list[bytes]()
    for argument, mask, values in rule.unless:
        body += [_step(_LOAD, 16 + 8 * argument), _step(_AND, mask)]
        body += [_step(_EQUAL, value, then=len(values) - place) for place, value in enumerate(values)]
        body.append(fail)
    body.append(_step(_RETURN, _ALLOW) if rule.unless else fail)
    return [_step(_EQUAL, number, otherwise=len(body)), *body]


def _seccomp(rules: Sequence[Rule]) -> None:
    audit, column = MACHINES[platform.machine()]
    refuse = _step(_RETURN, _FAIL | errno.ENOSYS)
    steps = [_step(_LOAD, 4), _step(_EQUAL, audit, then=1), refuse]  # 32-bit programs have other call numbers
    steps += [_step(_LOAD, 0), _step(_GREATER, _NEWEST_CALL, otherwise=1), refuse]
    for rule in rules:
        for call in rule.calls.split():
            if (number := NUMBERS[call][column]) is not None:
                steps += _rule(number, rule)
    steps.append(_step(_RETURN, _ALLOW))
    program = _Program(len(steps), b"".join(steps))
    _call("seccomp", "prctl", 22, 2, ctypes.byref(program), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def has_seccomp() -> bool:
    """True if this kernel has filters; it then complains about the program at address 0."""
    _libc.prctl(*map(ctypes.c_long, (22, 2, 0, 0, 0)))
    return ctypes.get_errno() == errno.EFAULT


# --- privileges and descriptors --------------------------------------------------------------------------------------------


def _drop_capabilities() -> None:
    """Drop all but the two capabilities by which root reads and writes files, within Landlock."""
    header = struct.pack("Ii", 0x20080522, 0)
    held = ctypes.create_string_buffer(24)
    _call("capabilities", "capget", header, held)
    keep = struct.unpack("6I", held.raw)[1] & (1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    _call("capabilities", "capset", header, struct.pack("6I", keep, keep, 0, 0, 0, 0))


def _limit_resources(writable: Sequence[str]) -> None:
    """Limit memory to half of the machine's, files to half of the free disk. No core dumps."""
    limits = {
        resource.RLIMIT_CORE: 1,  # unlike 0, this also disables dumps to a pipe
        resource.RLIMIT_DATA: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2,
    }
    for folder in writable[:1]:
        limits[resource.RLIMIT_FSIZE] = (disk := os.statvfs(folder)).f_frsize * disk.f_bavail // 2
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def build_wall(
    *,
    writable: Sequence[str],
    hidden: Sequence[str] = (),
    ports: Sequence[int] | None = (),
    children: bool = True,
    abi: int | None = None,
) -> None:
    """Put this process and its future threads and children behind the wall, for ever. Only standard descriptors stay open.

    Args:
        writable: Existing files, and folders with all in them, that may be written.
        hidden: Real paths of files that cannot be opened, nor can files that are created later in a folder above one.
        ports: TCP ports that may be connected to, at any address. Empty: no sockets at all. None: every port.
        children: True if it may start processes. Threads are always allowed.
        abi: The Landlock version to use. Default: the kernel's.

    Raises `OSError` if the kernel refuses or lacks a part, and if the process has other threads, which would stay outside.
    """
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise OSError(errno.EBUSY, f"the process has {threads} threads, and the wall is built around one: build it earlier")
    abi = landlock_abi() if abi is None else abi
    if not abi:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    os.closerange(3, 2**31 - 1)
    _limit_resources(writable)
    _call("no new privileges", "prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, required by the other parts
    _drop_capabilities()
    _landlock([os.devnull, "/dev/zero", "/dev/full", *writable], hidden, ports, abi)
    rules = (() if children else _NO_CHILDREN) + RULES + (_NO_SOCKETS if ports is not None and not ports else _TCP_CLIENTS)
    rules += (_WITHOUT_TRUNCATE if abi < 3 else ()) + (_without_scopes() if abi < LANDLOCK_SCOPES else ())
    _seccomp(rules)


def main() -> None:
    """Build the wall by the first argument (`build_wall`'s in JSON), then execute the command."""
    options, *command = sys.argv[1:]
    build_wall(**json.loads(options))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
