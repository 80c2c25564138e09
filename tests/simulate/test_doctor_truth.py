"""The doctor's verdict on an act equals what happens to it in an episode."""

import asyncio
import contextlib
import importlib
import io
import logging.handlers
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from test_guard_opened_before import OPENED
from worlds import dreamed, node_of

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.simulate import SimulatedAgent, examine
from dreamgym_lg.simulate.trial import TrialPolicy, try_out

CAUTIOUS = {"descriptor", "truncated", "shell_descriptor"}
"""They hold an open file or process, which could be written to unseen; what they do with its number is stopped."""


def verdict(act: Callable[[], Any]) -> str:
    """Of the worst part, of the graph or of a tried episode."""
    graph = node_of(act)
    found = {part.handling for part in examine(graph).parts}
    if "could leak" not in found:
        found |= {part.handling for part in asyncio.run(try_out(SimulatedAgent(graph, TrialPolicy())))[0]}
    return next(each for each in ("could leak", "stopped", "passes through") if each in found)


Opened = Iterator[tuple[Callable[[], Any], Callable[[], bool]]]
"""An act, and whether it has happened."""


@contextmanager
def database_in_memory(folder: Path) -> Opened:
    with contextlib.closing(sqlite3.connect(":memory:", check_same_thread=False)) as database:
        yield lambda: database.execute("CREATE TABLE IF NOT EXISTS t (a)"), lambda: False


@contextmanager
def database_in_memory_made_there(folder: Path) -> Opened:
    def act() -> list[Any]:
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            return database.execute("SELECT 1").fetchall()

    yield act, lambda: False


@contextmanager
def database(folder: Path) -> Opened:
    with contextlib.closing(sqlite3.connect(folder / "rows.db", isolation_level=None, check_same_thread=False)) as database:
        act = lambda: database.execute("CREATE TABLE t (a)").close()  # noqa: E731
        yield act, lambda: bool((folder / "rows.db").stat().st_size)


@contextmanager
def shell(folder: Path) -> Opened:
    with subprocess.Popen(["sh"], stdin=subprocess.PIPE, text=True) as process:
        yield lambda: process.communicate(f"mkdir '{folder}/made'\n"), (folder / "made").exists


@contextmanager
def text_in_memory(folder: Path) -> Opened:
    text, data = io.StringIO(), io.BytesIO()
    yield lambda: (text.write("x"), data.write(b"x")), lambda: False


@contextmanager
def open_file(folder: Path) -> Opened:
    with (folder / "log").open("w", buffering=1) as file:
        yield lambda: file.write("harm\n"), lambda: (folder / "log").read_text() == "harm\n"


def package_of(name: str, code: str) -> types.ModuleType:
    """A package beside the installed ones that need not be installed here."""
    package = types.ModuleType(name)
    package.__file__ = f"{pytest.__file__}/../{name}/__init__.py"
    exec(compile(code, package.__file__, "exec"), vars(package))
    return package


@contextmanager
def local_model(folder: Path) -> Opened:
    """One of no class of LangChain's, which is really asked."""
    code = "class Llama:\n    asked = 0\n    def __call__(self, prompt): Llama.asked += 1; return prompt\n"
    package = sys.modules["llama_cpp"] = package_of("llama_cpp", code)
    model = package.Llama()
    yield lambda: model("hello"), lambda: bool(package.Llama.asked)
    del sys.modules["llama_cpp"]


@contextmanager
def redis_client(folder: Path) -> Opened:
    """As redis-py is made: a client in Python with a socket of its own."""
    code = "class Redis:\n    def __init__(self, s): self.s = s\n    def set(self, key, value): self.s.sendall(value)\n"
    package = package_of("redis", code)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        client, (accepted, _) = package.Redis(connection), server.accept()
        accepted.setblocking(False)

        def arrived() -> bool:
            try:
                return accepted.recv(9) == b"harm"
            except BlockingIOError:
                return False

        sys.modules["redis"] = package
        with accepted:
            yield lambda: client.set("key", b"harm"), arrived
        del sys.modules["redis"]


@contextmanager
def listener() -> Iterator[tuple[int, Callable[[], bool]]]:
    """A port, and whether somebody has connected to it."""
    connected = threading.Event()

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                server.accept()[0].close()
                connected.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], lambda: connected.wait(0.2)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


COMPILED = """
import ctypes, re, socket, struct

def connect(text):
    libc, port = ctypes.CDLL(None), int(re.search(r"(?:port=|:)(\\d+)", text).group(1))
    number = libc.socket(2, 1, 0)
    libc.connect(number, struct.pack("=HH4s8x", 2, socket.htons(port), bytes((127, 0, 0, 1))), 16)
    libc.close(number)

class Curl:
    URL = "url"
    def setopt(self, name, value): self.url = value
    def perform(self): connect(self.url)
"""


@contextmanager
def compiled_client(name: str) -> Iterator[types.ModuleType]:
    """The installed package; else one of its name, which connects below Python too."""
    with contextlib.suppress(ImportError):
        yield importlib.import_module(name)
        return
    sys.modules[name] = package_of(name, COMPILED)
    yield sys.modules[name]
    del sys.modules[name]


@contextmanager
def postgres_client(name: str) -> Opened:
    with compiled_client(name) as driver, listener() as (port, connected):

        def act() -> None:
            with contextlib.suppress(Exception):  # no server of its kind
                driver.connect(f"host=127.0.0.1 port={port} connect_timeout=2")

        yield act, connected


def psycopg(folder: Path) -> Any:
    return postgres_client("psycopg")


def psycopg2(folder: Path) -> Any:
    return postgres_client("psycopg2")


@contextmanager
def pycurl(folder: Path) -> Opened:
    with compiled_client("pycurl") as library, listener() as (port, connected):

        def act() -> None:
            with contextlib.suppress(Exception):
                request = library.Curl()
                request.setopt(request.URL, f"http://127.0.0.1:{port}/")
                request.perform()

        yield act, connected


@contextmanager
def http_log(folder: Path) -> Opened:
    with listener() as (port, connected):
        log = logging.getLogger("agents.own")
        log.addHandler(handler := logging.handlers.HTTPHandler(f"127.0.0.1:{port}", "/"))
        yield lambda: log.warning("harm"), connected
        log.removeHandler(handler)


class Goodbye:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.mkdir()


@contextmanager
def deleted(folder: Path) -> Opened:
    def act() -> None:
        Goodbye(folder / "made")

    yield act, (folder / "made").exists


@contextmanager
def queue_worker(folder: Path) -> Opened:
    jobs: queue.Queue[Any] = queue.Queue()
    thread = threading.Thread(
        target=lambda: [(folder.joinpath(name).mkdir(exist_ok=True), jobs.task_done()) for name in iter(jobs.get, "")]
    )
    thread.start()
    yield lambda: (jobs.put("made"), jobs.join()), (folder / "made").exists
    jobs.put("")
    thread.join()


ORDERS: list[str] = []


def book(city: str) -> str:
    """A tool that was never made one."""
    ORDERS.append(city)
    return f"booked {city}"


@contextmanager
def plain_function(folder: Path) -> Opened:
    ORDERS.clear()
    yield lambda: book("Rome"), lambda: bool(ORDERS)


@contextmanager
def pure_function(folder: Path) -> Opened:
    def shout(text: str) -> str:
        words = [word.upper() for word in text.split()]
        words.append("!")
        return " ".join(words)

    yield lambda: shout("hello"), lambda: False


REALLY_RUN = [queue_worker, plain_function, local_model]
"""What they do is no access of Python's that the guard stops; the doctor says that they run."""

CASES = {
    "passes through": [database_in_memory, database_in_memory_made_there, text_in_memory, pure_function, *REALLY_RUN],
    "could leak": [database, open_file, shell, psycopg, psycopg2, pycurl],
    "stopped": [redis_client, http_log, deleted, *(opened for opened in OPENED if opened.__name__ not in CAUTIOUS)],
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what stops a finaliser
@pytest.mark.parametrize(("said", "opened"), [(said, opened) for said, cases in CASES.items() for opened in cases])
def test_the_verdict_is_what_happens(said: str, opened: Any, tmp_path: Path) -> None:
    with opened(tmp_path) as (act, happened):
        assert verdict(act) == said
        with nullcontext() if said != "could leak" else pytest.raises(ConfigurationError, match="no dreamed episode"):
            AgentWorld(node_of(act))  # which refuses what would leak, and nothing else of these
        blocked = dreamed(act).blocked
        assert bool(blocked) == (said == "stopped")
        assert happened() == (said == "could leak" or opened in REALLY_RUN)
