"""The guard at connections, also those that were open before, and what it allows."""

import asyncio
import http.client
import http.server
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.graph import START, StateGraph
from worlds import TASK, Answers, dreamed
from zoo.policy import ScriptedPolicy

from dreamgym_lg.simulate import Allow, RealAccessBlocked, simulated

POLICY = ScriptedPolicy()


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
    assert episode.blocked[0].target == address and "test_guard_network.py" in episode.blocked[0].where
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
        assert "test_guard_network.py" in episode.blocked[0].where, "though the task's coroutine is a library's"
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
