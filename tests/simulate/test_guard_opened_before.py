"""The guard at what production holds when an episode begins: processes, descriptors, listeners; and at what comes after it."""

import multiprocessing
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
from worlds import dreamed

from dreamgym_lg.simulate import Allow

Opened = Iterator[tuple[Callable[[], Any], Callable[[], bool]]]
"""An act, and whether it has happened."""


@contextmanager
def process_pool(folder: Path) -> Opened:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        yield lambda: pool.apply(os.mkdir, (folder / "made",)), (folder / "made").exists


@contextmanager
def process_pool_map(folder: Path) -> Opened:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        yield lambda: list(pool.imap(os.mkdir, [folder / "made"])), (folder / "made").exists


@contextmanager
def shell_descriptor(folder: Path) -> Opened:
    with subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin and process.stdout
        number = process.stdin.fileno()
        command = f"mkdir '{folder}/made'; echo done\n".encode()
        yield lambda: (os.write(number, command), process.stdout.readline()), (folder / "made").exists  # type: ignore[union-attr]


@contextmanager
def unix_socket(folder: Path) -> Opened:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(folder / "s"))
        server.listen()
        client.connect(str(folder / "s"))
        accepted, _ = server.accept()
        accepted.setblocking(False)

        def arrived() -> bool:
            try:
                return accepted.recv(10) == b"harm"
            except BlockingIOError:
                return False

        with accepted:
            yield lambda: client.sendall(b"harm"), arrived


@contextmanager
def descriptor(folder: Path) -> Opened:
    with open(folder / "victim", "wb") as file:
        yield lambda: os.pwrite(file.fileno(), b"harm", 0), lambda: (folder / "victim").read_bytes() == b"harm"


@contextmanager
def truncated(folder: Path) -> Opened:
    (folder / "victim").write_bytes(b"precious")
    with open(folder / "victim", "r+b") as file:
        yield lambda: os.ftruncate(file.fileno(), 0), lambda: (folder / "victim").read_bytes() == b""


@contextmanager
def shared_memory(folder: Path) -> Opened:
    memory = SharedMemory(create=True, size=4)

    def write() -> None:
        same = SharedMemory(memory.name)
        same.buf[:4] = b"harm"
        same.close()

    yield write, lambda: bytes(memory.buf[:4]) == b"harm"
    memory.close()
    memory.unlink()


@contextmanager
def raised_signal(folder: Path) -> Opened:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    yield lambda: signal.raise_signal(signal.SIGUSR1), lambda: bool(got)
    signal.signal(signal.SIGUSR1, before)


@contextmanager
def pidfd_signal(folder: Path) -> Opened:
    with subprocess.Popen(["sleep", "60"]) as process:
        number = os.pidfd_open(process.pid)
        act = lambda: (signal.pidfd_send_signal(number, signal.SIGTERM), process.wait())  # noqa: E731
        yield act, lambda: process.poll() is not None
        process.kill()
        os.close(number)


OPENED = [process_pool, process_pool_map, shell_descriptor, unix_socket, descriptor, truncated]
OPENED += [shared_memory, raised_signal, pidfd_signal]


@pytest.mark.parametrize("opened", OPENED)
def test_what_was_open_before_does_nothing_for_an_episode(opened: Any, tmp_path: Path) -> None:
    with opened(tmp_path) as (act, happened):
        episode = dreamed(act)
        assert not happened()
        assert episode.blocked and "test_guard_opened_before.py" in episode.blocked[0].where, episode.blocked
        act()
        assert happened(), "and production goes on with it"


@pytest.mark.parametrize("opened", [unix_socket, descriptor, truncated])
def test_what_was_open_before_may_be_allowed_by_name(opened: Any, tmp_path: Path) -> None:
    with opened(tmp_path) as (act, happened):
        assert dreamed(act, allow=Allow(paths=[tmp_path])).blocked == [] and happened()


def test_own_pairs_of_sockets_are_nothing_real() -> None:
    def harmless() -> bytes:
        left, right = socket.socketpair()
        with left, right:
            left.sendall(b"ping")
            return right.recv(4)

    assert dreamed(harmless).state["result"] == b"ping"  # type: ignore[attr-defined]


def test_a_name_is_not_looked_up() -> None:
    (blocked,) = dreamed(lambda: socket.getnameinfo(("192.0.2.7", 80), 0)).blocked
    assert blocked.event == "socket.getnameinfo" and blocked.target == "192.0.2.7"


def test_a_pool_outlives_a_callback_that_is_stopped(tmp_path: Path) -> None:
    """What the guard raises in a worker of production's would end it."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        workers = {pool.submit(threading.get_ident).result()}

        def node() -> None:
            begin = threading.Event()
            pool.submit(begin.wait).add_done_callback(lambda _: os.mkdir(tmp_path / "made"))
            begin.set()
            pool.submit(int).result()

        assert "in <lambda>" in dreamed(node).blocked[0].where and not (tmp_path / "made").exists()
        assert {pool.submit(threading.get_ident).result()} == workers
