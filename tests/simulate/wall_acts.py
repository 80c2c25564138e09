"""Acts with an effect outside of a scratch folder, of every kind that a machine has: run as a script, in a process of its own.

`python wall_acts.py NAME,... SCENE.json` plays some, `python wall_acts.py serve ...` those that it is told, each in a fork. It
says "began" before the act, so that a broken test is no wall.
"""

import _posixshmem
import asyncio
import contextlib
import ctypes
import dbm.dumb
import fcntl
import http.client
import importlib.util
import json
import logging
import mmap
import multiprocessing
import os
import pathlib
import readline
import resource
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"


@dataclass(frozen=True)
class Act:
    play: Callable[[Any], Any]
    needs: str = ""
    """A package, or `root`, or a program, without which the act has no effect anywhere."""


ACTS: dict[str, Act] = {}


def act(play: Callable[[Any], Any] | None = None, *, needs: str = "") -> Any:
    def add(play: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = play.__name__
        assert name not in ACTS, name
        ACTS[name] = Act(play, needs)
        return play

    return add(play) if play else add


def simple(needs: str = "", **acts: Callable[[Any], Any]) -> None:
    ACTS.update({name: Act(play, needs) for name, play in acts.items()})


def sys_call(*args: Any) -> int:
    result: int = libc.syscall(*(ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def c(function: str, *args: Any) -> int:
    result: int = getattr(libc, function)(*args)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
    return result


# `s.file`, `s.folder` (with one file) and `s.empty` exist outside; `s.new` does not, nor does `s.link`.

simple(
    open_w=lambda s: open(s.file, "w").close(),
    open_append=lambda s: os.write(os.open(s.file, os.O_WRONLY | os.O_APPEND), b"x"),
    open_rplus=lambda s: os.write(os.open(s.file, os.O_RDWR), b"x"),
    open_x=lambda s: open(s.new, "x").close(),
    os_open_creat=lambda s: os.open(s.new, os.O_CREAT),
    os_open_trunc_read_only=lambda s: os.open(s.file, os.O_RDONLY | os.O_TRUNC),
    pathlib_write=lambda s: pathlib.Path(s.new).write_text("x"),
    pycache=lambda s: (os.mkdir(f"{s.outside}/__pycache__"), open(f"{s.outside}/__pycache__/m.pyc", "w").close()),
    truncate=lambda s: os.truncate(s.file, 0),
    unlink=lambda s: os.unlink(s.file),
    unlink_at=lambda s: os.unlink("kept.txt", dir_fd=os.open(s.outside, os.O_RDONLY)),
    rmdir=lambda s: os.rmdir(s.empty),
    mkdir=lambda s: os.mkdir(s.new),
    mkdir_at=lambda s: os.mkdir("new", dir_fd=os.open(s.outside, os.O_RDONLY)),
    makedirs=lambda s: os.makedirs(f"{s.new}/a/b"),
    rename=lambda s: os.rename(s.file, s.new),
    rename_folder=lambda s: os.rename(s.folder, s.new),
    replace_from_scratch=lambda s: (open(f"{s.scratch}/mine", "w").close(), os.replace(f"{s.scratch}/mine", s.file)),
    move_into_scratch=lambda s: os.rename(s.file, f"{s.scratch}/stolen"),
    symlink=lambda s: os.symlink(s.file, s.new),
    hardlink=lambda s: os.link(s.file, s.new),
    hardlink_from_scratch=lambda s: (open(f"{s.scratch}/mine", "w").close(), os.link(f"{s.scratch}/mine", s.new)),
    write_through_hardlink=lambda s: (os.link(s.file, f"{s.scratch}/same"), open(f"{s.scratch}/same", "w").close()),
    write_through_symlink=lambda s: (os.symlink(s.file, f"{s.scratch}/link"), open(f"{s.scratch}/link", "w").close()),
    write_through_symlinked_folder=lambda s: (
        os.symlink(s.outside, f"{s.scratch}/folder"),
        open(f"{s.scratch}/folder/new", "w").close(),
    ),
    write_through_dots=lambda s: open(f"{s.scratch}/../outside/new", "w").close(),
    write_through_proc_root=lambda s: open(f"/proc/self/root{s.new}", "w").close(),
    write_through_proc_fd=lambda s: open(f"/proc/self/fd/{os.open(s.file, os.O_RDONLY)}", "w").close(),
    mkfifo=lambda s: os.mkfifo(s.new),
    mknod_file=lambda s: os.mknod(s.new),
    unix_socket_file=lambda s: socket.socket(socket.AF_UNIX).bind(s.new),
    chmod=lambda s: os.chmod(s.file, 0o777),
    chmod_descriptor=lambda s: os.fchmod(os.open(s.file, os.O_RDONLY), 0o777),
    chmod_folder=lambda s: os.chmod(s.folder, 0o700),
    utime=lambda s: os.utime(s.file, (1, 1)),
    utime_descriptor=lambda s: os.utime(os.open(s.file, os.O_RDONLY), (1, 1)),
    path_touch=lambda s: pathlib.Path(s.file).touch(),
    setxattr=lambda s: os.setxattr(s.file, "user.new", b"x"),
    setxattr_descriptor=lambda s: os.setxattr(os.open(s.file, os.O_RDONLY), "user.new", b"x"),
    removexattr=lambda s: os.removexattr(s.file, "user.kept"),
    file_attributes=lambda s: fcntl.ioctl(os.open(s.file, os.O_RDONLY), 0x40086602, struct.pack("l", 0x40)),
    rmtree=lambda s: shutil.rmtree(s.folder),
    shutil_move=lambda s: shutil.move(s.file, s.scratch),
    shutil_copy=lambda s: shutil.copy(__file__, s.new),
    copystat=lambda s: shutil.copystat("/usr", s.file),
    temporary_file=lambda s: tempfile.mkstemp(dir=s.outside),
    log_file=lambda s: logging.FileHandler(s.new).emit(logging.makeLogRecord({"msg": "x"})),
    zip_file=lambda s: zipfile.ZipFile(s.new, "w").writestr("a", "x"),
    memory_map=lambda s: mmap.mmap(os.open(s.file, os.O_RDWR), 4).__setitem__(0, 65),
    dbm=lambda s: dbm.dumb.open(s.new, "n").close(),
    readline_history=lambda s: readline.write_history_file(s.new),
    shared_memory=lambda s: _posixshmem.shm_open(s.shm, os.O_CREAT | os.O_RDWR, mode=0o600),
    shared_memory_file=lambda s: open(f"/dev/shm{s.shm}", "w").close(),
    own_affinity_of_others=lambda s: os.sched_setaffinity(
        s.victim, {*range(os.cpu_count() or 1)} - {min(os.sched_getaffinity(0))} or {0}
    ),
    priority_of_others=lambda s: os.setpriority(os.PRIO_PROCESS, s.victim, 7),
    scheduling_of_others=lambda s: os.sched_setscheduler(s.victim, os.SCHED_BATCH, os.sched_param(0)),
    limits_of_others=lambda s: resource.prlimit(s.victim, 7, (77, 77)),
)
simple(
    needs="root",
    chown=lambda s: os.chown(s.file, 12345, 12345),
    chown_descriptor=lambda s: os.fchown(os.open(s.file, os.O_RDONLY), 12345, 12345),
    chown_link=lambda s: os.chown(s.symlink, 12345, 12345, follow_symlinks=False),
    mknod_device=lambda s: os.mknod(s.new, 0o600 | 0o020000, os.makedev(1, 3)),
    memory_of_parent=lambda s: _write_at(f"/proc/{s.parent}/mem", s.address),
    mount=lambda s: c("mount", b"none", s.outside.encode(), b"tmpfs", 0, None),
)


def _write_at(path: str, address: int) -> None:
    with open(path, "r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(b"overwritten")


@act
def unnamed_file_linked(s: Any) -> None:
    unnamed = os.open(s.outside, os.O_TMPFILE | os.O_RDWR)
    c("linkat", -100, f"/proc/self/fd/{unnamed}".encode(), -100, s.new.encode(), 0x400)  # AT_SYMLINK_FOLLOW


@act
def copied_by_the_kernel(s: Any) -> None:
    os.copy_file_range(os.open(f"{s.folder}/inner.txt", os.O_RDONLY), os.open(s.file, os.O_WRONLY), 5)


# --- libraries ---


@act
def sqlite_file(s: Any) -> None:
    with closing(sqlite3.connect(s.new)) as base:
        base.execute("CREATE TABLE t (a)")


@act
def sqlite_attach(s: Any) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as base:
        base.execute("ATTACH ? AS other", [s.new])
        base.execute("CREATE TABLE other.t (a)")


@act
def sqlite_vacuum_into(s: Any) -> None:
    with closing(sqlite3.connect(":memory:")) as base:
        base.execute("CREATE TABLE t (a)")
        base.commit()
        base.execute("VACUUM INTO ?", [s.new])


@act
def sqlite_existing(s: Any) -> None:
    with closing(sqlite3.connect(s.database)) as base:
        base.execute("INSERT INTO t VALUES (1)")
        base.commit()


@act(needs="numpy")
def numpy_save(s: Any) -> None:
    import numpy

    numpy.save(s.new, numpy.zeros(3))


@act(needs="numpy")
def numpy_tofile(s: Any) -> None:
    import numpy

    numpy.zeros(3).tofile(s.new)


@act(needs="numpy")
def numpy_memmap(s: Any) -> None:
    import numpy

    numpy.memmap(s.new, mode="w+", shape=3)[:] = 1


@act(needs="torch")
def torch_save(s: Any) -> None:
    import torch

    torch.save(torch.zeros(3), s.new)


@act(needs="safetensors")
def safetensors_save(s: Any) -> None:
    import numpy
    from safetensors.numpy import save_file

    save_file({"a": numpy.zeros(3)}, s.new)


@act(needs="pyarrow")
def parquet(s: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), s.new)


@act(needs="pyarrow")
def arrow_stream(s: Any) -> None:
    import pyarrow

    with pyarrow.OSFile(s.new, "wb") as file:
        file.write(b"x")


@act(needs="duckdb")
def duckdb_file(s: Any) -> None:
    import duckdb

    duckdb.connect(s.new).execute("CREATE TABLE t (a INT)")


@act(needs="tokenizers")
def tokenizers_save(s: Any) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    Tokenizer(BPE()).save(s.new)


@act(needs="PIL")
def picture(s: Any) -> None:
    from PIL import Image

    Image.new("L", (1, 1)).save(s.new, "png")


# --- the C library and bare system calls ---

simple(
    libc_open=lambda s: c("open", s.new.encode(), os.O_CREAT | os.O_WRONLY, 0o600),
    libc_creat=lambda s: c("creat", s.file.encode(), 0o600),
    libc_fopen=lambda s: libc.fclose(ctypes.c_void_p(_fopen(s.new))),
    libc_unlink=lambda s: c("unlink", s.file.encode()),
    libc_rename=lambda s: c("rename", s.file.encode(), s.new.encode()),
    libc_truncate=lambda s: c("truncate", s.file.encode(), ctypes.c_long(0)),
    libc_chmod=lambda s: c("chmod", s.file.encode(), 0o777),
    libc_system=lambda s: libc.system(f"echo x > {s.new}".encode()),
    libc_kill=lambda s: c("kill", s.victim, signal.SIGKILL),
    openat2=lambda s: sys_call(437, -100, s.new.encode(), struct.pack("QQQ", os.O_CREAT | os.O_WRONLY, 0o600, 0), 24),
    fchmodat2=lambda s: sys_call(452, -100, s.file.encode(), 0o777, 0),
    setxattrat=lambda s: sys_call(463, -100, s.file.encode(), 0, b"user.new", _xattr_args(), 16),
    file_setattr=lambda s: sys_call(469, -100, s.file.encode(), struct.pack("QIIII", 0x80, 0, 0, 0, 0), 24, 0),
)


def _fopen(path: str) -> int:
    libc.fopen.restype = ctypes.c_void_p
    if not (file := libc.fopen(path.encode(), b"w")):
        raise OSError(ctypes.get_errno(), "fopen")
    return int(file)


_VALUE = ctypes.create_string_buffer(b"x")


def _xattr_args() -> bytes:
    return struct.pack("QII", ctypes.addressof(_VALUE), 1, 0)


@act
def io_uring_setxattr(s: Any) -> None:
    """The ring does it in the kernel, past every filter of system calls: linux/io_uring.h."""
    parameters = ctypes.create_string_buffer(120)
    ring = sys_call(425, 1, parameters)
    entries, offsets = struct.unpack_from("I", parameters, 0)[0], struct.unpack_from("10I", parameters, 40)
    assert entries == 1
    shared = mmap.mmap(ring, 4096, offset=0)
    requests = mmap.mmap(ring, 4096, offset=0x10000000)
    path, name = ctypes.create_string_buffer(s.file.encode()), ctypes.create_string_buffer(b"user.new")
    addresses = [ctypes.addressof(each) for each in (name, _VALUE, path)]
    # opcode SETXATTR, flags, ioprio, fd, value, name, length, xattr flags, user data, buffer, personality, splice, path
    requests[:64] = struct.pack("BBHiQQIIQHHiQQ", 42, 0, 0, 0, addresses[1], addresses[0], 1, 0, 0, 0, 0, 0, addresses[2], 0)
    tail = offsets[1]
    shared[tail : tail + 4] = struct.pack("I", 1)
    sys_call(426, ring, 1, 1, 1, None, 0)


# --- other programs, and children ---

simple(
    sh_redirect=lambda s: subprocess.run(["sh", "-c", f"echo x > {s.new}"]),
    sh_touch=lambda s: subprocess.run(["touch", s.file]),
    sh_remove=lambda s: subprocess.run(["rm", "-f", s.file]),
    sh_chmod=lambda s: subprocess.run(["chmod", "777", s.file]),
    sh_kill=lambda s: subprocess.run(["sh", "-c", f"kill -9 {s.victim}"]),
    python_child=lambda s: subprocess.run([sys.executable, "-c", f"open({s.new!r}, 'w')"]),
    os_system=lambda s: os.system(f"echo x > {s.new}"),
    os_popen=lambda s: os.popen(f"echo x > {s.new}").close(),
    posix_spawn=lambda s: os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", f"echo x > {s.new}"], os.environ), 0),
    exec_shell=lambda s: os.execv("/bin/sh", ["sh", "-c", f"echo x > {s.new}"]),
    process_spawned=lambda s: _in_process("spawn", s),
    process_forked=lambda s: _in_process("fork", s),
)


def write_new(path: str) -> None:
    pathlib.Path(path).write_text("x")


def _in_process(method: str, s: Any) -> None:
    process = multiprocessing.get_context(method).Process(target=write_new, args=(s.new,))  # type: ignore[attr-defined]
    process.start()
    process.join()


@act
def process_pool(s: Any) -> None:
    with ProcessPoolExecutor(1) as pool:
        pool.submit(write_new, s.new).result()


@act
def forked(s: Any) -> None:
    if (child := os.fork()) == 0:
        write_new(s.new)
        os._exit(0)
    os.waitpid(child, 0)


@act
def daemon(s: Any) -> None:
    """A grandchild in a session of its own, which outlives the process; the test waits for the pipe that it inherits."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.1)
            write_new(s.new)
        os._exit(0)


@act
def at_exit(s: Any) -> None:
    import atexit

    atexit.register(write_new, s.new)


@act
def asyncio_subprocess(s: Any) -> None:
    async def run() -> None:
        await (await asyncio.create_subprocess_shell(f"echo x > {s.new}")).wait()

    asyncio.run(run())


# --- sockets ---

simple(
    tcp=lambda s: socket.create_connection(("127.0.0.1", s.port)).sendall(b"x"),
    http_client=lambda s: _post(s).getresponse().read(),
    urllib_post=lambda s: urllib.request.urlopen(s.url, b"x").read(),
    bash_tcp=lambda s: subprocess.run(["bash", "-c", f"echo x > /dev/tcp/127.0.0.1/{s.port}"]),
    bash_udp=lambda s: subprocess.run(["bash", "-c", f"echo x > /dev/udp/127.0.0.1/{s.udp}"]),
    udp=lambda s: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", s.udp)),
    unix_stream=lambda s: _unix(socket.SOCK_STREAM, s.stream),
    unix_datagram=lambda s: _unix(socket.SOCK_DGRAM, s.datagram),
    unix_abstract=lambda s: _unix(socket.SOCK_DGRAM, "\0" + s.abstract),
    unix_pair_sends_elsewhere=lambda s: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"x", s.datagram),
    fast_open=lambda s: socket.socket().sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", s.port)),
    mptcp=lambda s: _connected(socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262), s),
)
simple(needs="root", raw_socket=lambda s: _raw(s))
simple(needs="curl", curl=lambda s: subprocess.run(["curl", "-sS", "-d", "x", s.url]))


def _post(s: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", s.port)
    connection.request("POST", "/", b"x")
    return connection


def _unix(kind: int, address: str) -> None:
    with socket.socket(socket.AF_UNIX, kind) as sender:
        sender.connect(address)
        sender.sendall(b"x")


def _connected(client: socket.socket, s: Any) -> None:
    client.connect(("127.0.0.1", s.port))
    client.sendall(b"x")


def _raw(s: Any) -> None:
    """A UDP packet, made by hand."""
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP) as raw:
        raw.sendto(struct.pack("!HHHH", 1, s.udp, 9, 0) + b"x", ("127.0.0.1", 0))


@act(needs="requests")
def requests_post(s: Any) -> None:
    import requests

    requests.post(s.url, data="x")


@act(needs="httpx")
def httpx_post(s: Any) -> None:
    import httpx

    httpx.post(s.url, content="x")


@act
def asyncio_connection(s: Any) -> None:
    async def send() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(b"x")
        await writer.drain()

    asyncio.run(send())


@act(needs="uvloop")
def uvloop_connection(s: Any) -> None:
    import uvloop

    async def send() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(b"x")
        await writer.drain()

    uvloop.run(send())


@act
def libc_connect(s: Any) -> None:
    client = c("socket", 2, 1, 0)
    c("connect", client, struct.pack("=H", 2) + struct.pack("!H4s8x", s.port, bytes([127, 0, 0, 1])), 16)
    c("write", client, b"x", ctypes.c_size_t(1))


@act
def libc_sends_udp(s: Any) -> None:
    client = c("socket", 2, 2, 0)
    address = struct.pack("=H", 2) + struct.pack("!H4s8x", s.udp, bytes([127, 0, 0, 1]))
    c("sendto", client, b"x", ctypes.c_size_t(1), 0, address, 16)


# --- other processes ---

simple(
    kill=lambda s: os.kill(s.victim, signal.SIGTERM),
    kill_parent=lambda s: os.kill(s.parent, signal.SIGUSR1),
    kill_group=lambda s: os.killpg(s.victim, signal.SIGTERM),
    pidfd_signal=lambda s: signal.pidfd_send_signal(os.pidfd_open(s.victim), signal.SIGTERM),
    sigqueue=lambda s: c("sigqueue", s.victim, signal.SIGTERM, ctypes.c_void_p(0)),
    sigio=lambda s: _sigio(s),
    io_priority_of_others=lambda s: sys_call(251 if X86 else 30, 1, s.victim, 3 << 13),
    pipe_of_parent=lambda s: os.write(os.open(f"/proc/{s.parent}/fd/{s.pipe}", os.O_WRONLY), b"x"),
    inherited_file=lambda s: os.write(s.inherited, b"x"),
    inherited_socket=lambda s: os.write(s.connected, b"x"),
    inherited_folder=lambda s: os.mkdir("new", dir_fd=s.folder_fd),
    message_queue=lambda s: sys_call(240 if X86 else 180, s.shm[1:].encode(), os.O_CREAT | os.O_RDWR, 0o600, None),
    shared_memory_sysv=lambda s: sys_call(29 if X86 else 194, s.key, 4096, 0o1600),
    semaphore_sysv=lambda s: sys_call(64 if X86 else 190, s.key, 1, 0o1600),
    messages_sysv=lambda s: sys_call(68 if X86 else 186, s.key, 0o1600),
    key_ring=lambda s: sys_call(248 if X86 else 217, b"user", s.shm.encode(), b"x", 1, -4),
)
simple(
    needs="root",
    memory_written=lambda s: _process_write(s),
    descriptor_stolen=lambda s: os.write(sys_call(438, os.pidfd_open(s.parent), s.pipe, 0), b"x"),
    ptrace=lambda s: (c("ptrace", 16, s.victim, None, None), os.waitpid(s.victim, 0), c("ptrace", 8, s.victim, None, None)),
)


def _sigio(s: Any) -> None:
    """The kernel signals whoever a descriptor names as its owner, once it can be read."""
    reads, writes = os.pipe()
    fcntl.fcntl(reads, fcntl.F_SETOWN, s.victim)
    fcntl.fcntl(reads, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(writes, b"x")


def _process_write(s: Any) -> None:
    text = ctypes.create_string_buffer(b"overwritten")
    mine = struct.pack("QQ", ctypes.addressof(text), 11)
    sys_call(311 if X86 else 271, s.parent, mine, 1, struct.pack("QQ", s.address, 11), 1, 0)


VARIANTS = {"open_truncates": Act(lambda s: os.open(s.file, os.O_TRUNC))}
"""Acts that are another way to do one of `ACTS`, for the walls of older kernels."""


def play(name: str, description: dict[str, Any]) -> None:
    print("began", flush=True)
    try:
        (ACTS | VARIANTS)[name].play(SimpleNamespace(**description))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def serve(orders: socket.socket, play: Callable[[str, dict[str, Any]], None] = play) -> None:
    """Fork a process for each order: what all of them import is imported once."""
    while True:
        text, (output, *given), _, _ = socket.recv_fds(orders, 100_000, 8)
        order = json.loads(text)
        if (child := os.fork()) == 0:
            break
        os.waitpid(child, 0)
        for number in (output, *given):
            os.close(number)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    description = order["scene"] | dict(zip(("inherited", "folder_fd", "connected"), given, strict=True))
    os.environ["TMPDIR"] = description["scratch"]
    if order["walled"]:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        kernel.build_wall(writable=[description["scratch"]])
    play(order["name"], description)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        spec = importlib.util.spec_from_file_location("kernel", sys.argv[3])  # without the library, which starts threads
        kernel = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernel)
        with contextlib.suppress(ValueError):  # no order comes any more
            serve(socket.socket(fileno=int(sys.argv[2])))
    else:
        *earlier, last = sys.argv[1].split(",")
        for name in earlier:
            if (child := os.fork()) == 0:
                last = name
                break
            os.waitpid(child, 0)
        play(last, json.loads(pathlib.Path(sys.argv[2]).read_text()))
