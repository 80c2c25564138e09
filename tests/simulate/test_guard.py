"""The guard: nothing real happens inside an episode, what was stopped is told, and production is as it was."""

import asyncio
import http.client
import http.server
import logging
import multiprocessing
import os
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.graph import START, StateGraph
from worlds import TASK, Answers, played
from zoo import World
from zoo.hostile import HOSTILE, Hostile, hostile_agent, hostile_node, scene
from zoo.policy import ScriptedPolicy

from dreamgym_lg.errors import EnvironmentFailed
from dreamgym_lg.simulate import Allow, Episode, RealAccessBlocked, SimulatedAgent, simulated

POLICY = ScriptedPolicy()
BUILDS = pytest.mark.parametrize("build", [hostile_node, hostile_agent])
EVERY = pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)


def node_of(act: Callable[[], Any]) -> Any:
    def node(state: dict) -> dict[str, Any]:
        return {"result": act()}

    return StateGraph(dict).add_node("node", node).add_edge(START, "node").compile()


def dreamed(act: Callable[[], Any], **options: Any) -> Episode:
    """An episode in which a node did that; what was raised is only what a guard raises."""
    episode = simulated(node_of(act), policy=POLICY, environment=Answers(), task=TASK, **options)
    try:
        with episode:
            episode.state = episode.invoke({"result": None})  # type: ignore[attr-defined]
    except RealAccessBlocked as error:
        assert set(error.blocked) <= set(episode.blocked)
    return episode


@EVERY
@BUILDS
async def test_nothing_hostile_happens_and_it_is_told(build: Any, hostile: Hostile, tmp_path: Path) -> None:
    with scene(tmp_path / "scene") as world:
        built = build(hostile, world)
        options: Any = {"pass_through": built.passthrough, "recursion_limit": 5}
        episode = simulated(built.graph, policy=POLICY, environment=Answers(), task=TASK, **options)
        with pytest.raises(RealAccessBlocked, match="hostile"):
            async with episode:
                await episode.ainvoke(built.payload)
        assert not hostile.happened(world)
        assert episode.blocked and all("hostile" in blocked.where and ".py:" in blocked.where for blocked in episode.blocked)

        agent = SimulatedAgent(built.graph, POLICY, payload=lambda task: built.payload, **options)
        with pytest.raises(EnvironmentFailed, match=r"real world: .*hostile"):
            await played(agent, Answers())
        assert not hostile.happened(world)
        await built.ainvoke(built.graph, built.payload)
        assert hostile.happened(world)


@pytest.mark.parametrize("hostile", [hostile for hostile in HOSTILE if "-" not in hostile.name], ids=lambda each: each.name)
async def test_a_simulated_tool_never_gets_there(hostile: Hostile, tmp_path: Path) -> None:
    with scene(tmp_path / "scene") as world:
        built = hostile_agent(hostile, world)
        async with simulated(built.graph, policy=POLICY, environment=Answers(), task=TASK) as episode:
            state = await episode.ainvoke(built.payload)
        assert not hostile.happened(world) and episode.blocked == []
        assert [message.text for message in state["messages"] if message.type == "tool"] == ["dreamed 1 of harm"]


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    """Keeps connections open and counts requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.server.visits += 1  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.visits = 0  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _raw(port: int) -> Callable[[], Any]:
    client = socket.create_connection(("127.0.0.1", port))
    return lambda: (client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), client.recv(500))


def _raw_messages(port: int) -> Callable[[], Any]:
    client = socket.create_connection(("127.0.0.1", port))
    return lambda: (client.sendmsg([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"]), client.recv(500))


def _raw_file(port: int) -> Callable[[], Any]:
    client = socket.create_connection(("127.0.0.1", port))

    def send() -> bytes:
        with client.makefile("wb") as file:
            file.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return client.recv(500)

    return send


def _descriptor(port: int) -> Callable[[], Any]:
    client = socket.create_connection(("127.0.0.1", port))
    return lambda: (os.write(client.fileno(), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), client.recv(500))


def _kept_alive(port: int) -> Callable[[], Any]:
    client = http.client.HTTPConnection("127.0.0.1", port)

    def get() -> bytes:
        client.request("GET", "/")
        return client.getresponse().read()

    get()
    return get


def _httpx(port: int) -> Callable[[], Any]:
    client = httpx.Client(trust_env=False)
    client.get(f"http://127.0.0.1:{port}/")
    return lambda: client.get(f"http://127.0.0.1:{port}/")


def _requests(port: int) -> Callable[[], Any]:
    session = pytest.importorskip("requests").Session()
    session.trust_env = False
    session.get(f"http://127.0.0.1:{port}/")
    return lambda: session.get(f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize("connect", [_raw, _raw_messages, _raw_file, _descriptor, _kept_alive, _httpx, _requests])
def test_an_open_connection_sends_nothing(connect: Any, server: Any) -> None:
    send = connect(server.server_address[1])
    before = server.visits
    episode = dreamed(send)
    assert server.visits == before
    address = f"127.0.0.1:{server.server_address[1]}"
    assert episode.blocked[0].target == address and "test_guard.py" in episode.blocked[0].where
    allowed = dreamed(connect(server.server_address[1]), allow=Allow(hosts=[address]))
    assert allowed.blocked == [] and server.visits > before


async def test_an_open_async_client_sends_nothing(server: Any) -> None:
    address = f"127.0.0.1:{server.server_address[1]}"

    async def node(state: dict) -> dict[str, Any]:
        replies = await asyncio.gather(client.get(f"http://{address}/"))
        return {"result": replies[0].text}

    graph = StateGraph(dict).add_node("node", node).add_edge(START, "node").compile()
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.get(f"http://{address}/")
        episode = simulated(graph, policy=POLICY, environment=Answers(), task=TASK)
        with pytest.raises(RealAccessBlocked, match=address):
            async with episode:
                await episode.ainvoke({"result": None})
        assert server.visits == 1
        assert "test_guard.py" in episode.blocked[0].where, "though the task's coroutine is a library's"
        async with simulated(graph, policy=POLICY, environment=Answers(), allow=Allow(hosts=[address])) as episode:
            assert (await episode.ainvoke({"result": None}))["result"] == "ok"


def _datagram(address: tuple[str, int]) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        return client.sendto(b"harm", address)


def test_a_datagram_is_not_sent() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(5)
        address = receiver.getsockname()
        episode = dreamed(lambda: _datagram(address))
        assert episode.blocked[0].event == "socket.sendto"
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            receiver.recv(10)
        assert dreamed(lambda: _datagram(address), allow=Allow(hosts=["127.0.0.1"])).blocked == []
        assert receiver.recv(10) == b"harm"


def test_a_file_is_not_sent(server: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    with socket.create_connection(server.server_address[:2]) as client, open(tmp_path / "file", "rb") as file:
        for send in (lambda: client.sendfile(file), lambda: os.sendfile(client.fileno(), file.fileno(), 0, 99)):
            assert dreamed(send).blocked[0].event in ("socket.sendfile", "os.sendfile")
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(10)
    assert server.visits == 0


def _write_pid(path: str) -> None:
    Path(path).write_text(str(os.getpid()))


def _forked(path: str) -> None:
    child = os.fork()
    if child == 0:
        _write_pid(path)
        os._exit(0)
    os.waitpid(child, 0)


def _replaced(path: str) -> None:
    """Of the process itself: were it let through, there would be no test left to tell."""
    os.execv("/bin/sh", ["sh", "-c", f"echo 1 > {path}"])


def _started(method: str) -> Callable[[str], None]:
    def start(path: str) -> None:
        process = multiprocessing.get_context(method).Process(target=_write_pid, args=(path,))  # type: ignore[attr-defined]
        process.start()
        process.join()

    return start


@pytest.mark.parametrize("start", [_forked, _replaced, _started("fork"), _started("spawn"), _started("forkserver")])
def test_no_process_is_started(start: Any, tmp_path: Path) -> None:
    episode = dreamed(lambda: start(str(tmp_path / "pid")))
    assert episode.blocked and "test_guard.py" in episode.blocked[0].where
    assert not (tmp_path / "pid").exists()


def test_an_open_process_pool_is_not_given_work(tmp_path: Path) -> None:
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        pool.submit(os.getpid).result()
        assert dreamed(lambda: pool.submit(os.mkdir, tmp_path / "made").result()).blocked
    assert not (tmp_path / "made").exists()


def test_the_allowed_is_let_through_and_no_more(server: Any, tmp_path: Path) -> None:
    port = server.server_address[1]
    mine, other = tmp_path / "mine", tmp_path / "mine-not"
    mine.mkdir(), other.mkdir()
    allow = Allow(hosts=[f"localhost:{port}"], paths=[mine])

    def harmless() -> None:
        with socket.create_connection(("localhost", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            client.recv(500)
        (mine / "folder").mkdir()
        (mine / "folder/file").write_text("x")
        (mine / "folder/file").rename(mine / "folder/renamed")
        (mine / "link").symlink_to("/etc")
        import shutil

        shutil.rmtree(mine / "folder")
        with closing(sqlite3.connect(mine / "rows.db")) as database:
            database.execute("CREATE TABLE x (y)")

    assert dreamed(harmless, allow=allow).blocked == [] and server.visits == 1
    assert (mine / "rows.db").exists() and not (mine / "folder").exists()
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        for forbidden in (
            lambda: socket.create_connection(elsewhere.getsockname()),
            lambda: socket.create_connection(("example.invalid", port)),
            lambda: (other / "file").write_text("x"),
            lambda: (mine / "../mine-not/file").write_text("x"),
            lambda: (mine / "link" / "harm").write_text("x"),
            lambda: (mine / "rows.db").rename(other / "rows.db"),
            lambda: os.link(__file__, mine / "linked"),
            lambda: sqlite3.connect(f"{other}/mode=ro.db"),
        ):
            assert dreamed(forbidden, allow=allow).blocked
    assert list(other.iterdir()) == []


def test_what_every_program_does_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.txt").write_text("seen")
    (tmp_path / "fresh_module.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    logger = logging.getLogger("a.user")
    handler = logging.FileHandler(tmp_path / "log.txt", delay=True)
    logger.addHandler(handler)

    def harmless() -> list[Any]:
        logger.warning("said")
        import fresh_module  # type: ignore[import-not-found]

        with open(os.devnull, "w") as nowhere, closing(sqlite3.connect(":memory:")) as database:
            nowhere.write("x")
            rows = database.execute("SELECT 1").fetchall()
        with closing(sqlite3.connect(f"file:{tmp_path}/data.txt?mode=ro", uri=True)):
            pass
        with ThreadPoolExecutor(1) as pool:
            text = pool.submit((tmp_path / "data.txt").read_text).result()
        print("said too")
        return [text, fresh_module.VALUE, rows, asyncio.run(asyncio.sleep(0, "slept"))]

    try:
        episode = dreamed(harmless)
    finally:
        logger.removeHandler(handler)
        handler.close()
        sys.modules.pop("fresh_module", None)
    assert episode.blocked == []
    assert episode.state["result"] == ["seen", 7, [(1,)], "slept"]  # type: ignore[attr-defined]
    assert "said" in (tmp_path / "log.txt").read_text()
    assert list((tmp_path / "__pycache__").glob("fresh_module*.pyc"))


def test_a_librarys_thread_is_traced_to_the_users_line(tmp_path: Path) -> None:
    def in_pool() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(os.mkdir, tmp_path / "made").result()

    def in_thread() -> None:
        thread = threading.Thread(target=os.mkdir, args=(tmp_path / "made",))
        thread.start()
        thread.join()

    monkeypatched = threading.excepthook
    threading.excepthook = lambda _: None
    try:
        for act in (in_pool, in_thread):
            (blocked,) = dreamed(act).blocked
            assert f"test_guard.py:{act.__code__.co_firstlineno + 2} in {act.__name__}" in blocked.where
    finally:
        threading.excepthook = monkeypatched
    assert not (tmp_path / "made").exists()


def test_the_policy_and_the_world_may_do_what_they_must(tmp_path: Path) -> None:
    class Noting(Answers):
        def step(self, action: str) -> Any:
            (tmp_path / "asked").write_text(action)
            return super().step(action)

    class NotingPolicy(ScriptedPolicy):
        def _asked(self, messages: Any, kwargs: Any) -> None:
            (tmp_path / "policy").write_text("asked")

    world = World(folder=tmp_path / "world")
    built = hostile_agent(HOSTILE[0], world)
    with simulated(built.graph, policy=NotingPolicy(), environment=Noting(), task=TASK) as episode:
        episode.invoke(built.payload)
    assert episode.blocked == [] and (tmp_path / "asked").exists() and (tmp_path / "policy").exists()


def test_outside_of_episodes_it_does_not_stand(tmp_path: Path) -> None:
    episode = simulated(node_of(lambda: None), policy=POLICY, environment=Answers(), task=TASK)
    with pytest.raises(RealAccessBlocked, match="allow it with allow="), episode:
        other = threading.Thread(target=lambda: (tmp_path / "other").write_text(""))
        (tmp_path / "x").write_text("")
    other.start()
    other.join()
    assert (tmp_path / "other").exists()
    (tmp_path / "x").write_text("")
    assert len(episode.blocked) == 1
