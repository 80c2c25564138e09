"""The guard: nothing real happens inside an episode, what was stopped is told, and production is as it was."""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sqlite3
import sys
import syslog
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from logging.handlers import RotatingFileHandler
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langgraph.graph import START, StateGraph
from worlds import TASK, Answers, dreamed, node_of, played, slow_unless
from zoo import World
from zoo.hostile import EVERYDAY, HOSTILE, PLAIN, TYPICAL, Hostile, hostile_agent, hostile_node, scene
from zoo.policy import ScriptedPolicy

from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed
from dreamgym_lg.simulate import Allow, RealAccessBlocked, SimulatedAgent, simulated

POLICY = ScriptedPolicy()
CASES = [slow_unless(hostile in EVERYDAY, hostile_node, hostile) for hostile in HOSTILE]
CASES += [slow_unless(hostile.name.startswith(TYPICAL), hostile_agent, hostile) for hostile in HOSTILE]


@pytest.mark.parametrize(("build", "hostile"), CASES)
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


@pytest.mark.parametrize("hostile", [slow_unless(hostile.name in TYPICAL, hostile) for hostile in PLAIN])
async def test_a_simulated_tool_never_gets_there(hostile: Hostile, tmp_path: Path) -> None:
    with scene(tmp_path / "scene") as world:
        built = hostile_agent(hostile, world)
        async with simulated(built.graph, policy=POLICY, environment=Answers(), task=TASK) as episode:
            state = await episode.ainvoke(built.payload)
        assert not hostile.happened(world) and episode.blocked == []
        assert [message.text for message in state["messages"] if message.type == "tool"] == ["dreamed 1 of harm"]


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


class Webhook(logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        Path(self.baseFilename).with_name("webhook").write_text(record.getMessage())


def test_only_log_files_of_production_are_written(tmp_path: Path) -> None:
    logger = logging.getLogger("a.user")

    def blocked(*handlers: logging.Handler, create: Callable[[], logging.Handler] | None = None) -> list[str]:
        logger.handlers[:] = handlers

        def log() -> None:
            if create is not None:
                logger.addHandler(create())
            for _ in range(40):
                logger.warning("dreamed")

        try:
            return [Path(each.target).name for each in dreamed(log).blocked]
        finally:
            for handler in logger.handlers[:]:
                logger.removeHandler(handler)
                handler.close()

    assert blocked(create=lambda: logging.FileHandler(tmp_path / "new.log", delay=True)) == ["new.log"]
    assert blocked(Webhook(tmp_path / "a.log", delay=True)) == ["webhook"]
    rotating = RotatingFileHandler(tmp_path / "b.log", maxBytes=200, backupCount=1)
    rotating.emit(logging.makeLogRecord({"msg": "of production"}))
    assert blocked(rotating) == []
    assert "of production" in (tmp_path / "b.log").read_text() and not (tmp_path / "b.log.1").exists()


def test_a_librarys_thread_is_traced_to_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that was stopped prints no traceback, but one line."""

    def in_pool() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(os.mkdir, tmp_path / "made").result()

    def in_thread() -> None:
        thread = threading.Thread(target=os.mkdir, args=(tmp_path / "made",))
        thread.start()
        thread.join()

    uncaught = list[Any]()
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    for act in (in_pool, in_thread):
        (blocked,) = dreamed(act).blocked
        assert f"test_guard.py:{act.__code__.co_firstlineno + 2} in {act.__name__}" in blocked.where
    (line,) = caplog.messages
    assert "thread 'Thread-" in line and "in in_thread, has ended: a dreamed episode must not touch" in line
    assert uncaught == [] and not (tmp_path / "made").exists()


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


class Usage(BaseCallbackHandler):
    """Writes down every answer of a model, as the usage logs of teams do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_llm_end(self, *_: Any, **__: Any) -> None:
        self.path.write_text("one more answer")


class AsyncUsage(AsyncCallbackHandler):
    def __init__(self, path: Path) -> None:
        self.path = path

    async def on_llm_end(self, *_: Any, **__: Any) -> None:
        self.path.write_text("one more answer")


@pytest.mark.parametrize("handler", [Usage, AsyncUsage])
@pytest.mark.parametrize("call", ["invoke", "ainvoke", "stream", "astream"])
async def test_callbacks_of_the_agent_are_guarded_while_the_policy_answers(call: str, handler: Any, tmp_path: Path) -> None:
    model = ScriptedPolicy()

    async def ask(_: Any) -> dict[str, Any]:
        made = getattr(model, call)("hello")
        if call == "astream":
            return {"result": [chunk async for chunk in made]}
        return {"result": await made if call == "ainvoke" else list(made)}

    graph: Any = StateGraph(dict).add_node("node", ask).add_edge(START, "node").compile()
    graph = graph.with_config(callbacks=[handler(tmp_path / "agents")])
    policy = ScriptedPolicy(callbacks=[handler(tmp_path / "policys")])
    episode = simulated(graph, policy=policy, environment=Answers(), task=TASK)
    with pytest.raises(RealAccessBlocked, match="in on_llm_end"):
        async with episode:
            await episode.ainvoke({"result": None})
    assert not (tmp_path / "agents").exists() and (tmp_path / "policys").exists()
    assert {act.kind for act in episode.acts} >= {"blocked"}


@pytest.mark.parametrize(
    ("act", "event"),
    [
        (lambda: syslog.syslog(syslog.LOG_DEBUG, "dreamed"), "syslog.syslog"),
        (lambda: socket.sethostname(socket.gethostname()), "socket.sethostname"),
        (lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()), "time.clock_settime"),
        (lambda: socket.socket().listen(), "socket.listen"),
    ],
)
def test_the_machine_is_not_changed(act: Callable[[], Any], event: str) -> None:
    assert [blocked.event for blocked in dreamed(act).blocked] == [event]


def test_a_server_may_listen_where_hosts_are_allowed() -> None:
    def serve() -> None:
        with socket.create_server(("127.0.0.1", 0)):
            pass

    assert dreamed(serve, allow=Allow(hosts=["127.0.0.1"])).blocked == []


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


def test_a_text_is_no_list_of_what_is_allowed() -> None:
    """Each letter of it would be: "/" would allow every file."""
    with pytest.raises(ConfigurationError, match="give a list"):
        Allow(paths="/var/log")


@pytest.mark.parametrize("host", ["https://shop.example", "shop.example/orders", "10.0.0.0/8"])
def test_an_address_of_a_page_is_no_host(host: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Allow\(hosts=\['{host}'\]\): a host has no '/'.*'host:port'"):
        Allow(hosts=[host])


def test_a_path_is_meant_in_the_folder_that_is_given_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    number = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.chdir(scratch)
    allow = Allow(paths=[scratch])
    (blocked,) = dreamed(lambda: os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=number), allow=allow).blocked
    assert blocked.target == str(tmp_path / "new") and not (tmp_path / "new").exists()
    os.close(number)
    number = os.open(scratch, os.O_RDONLY)
    monkeypatch.chdir(tmp_path)
    assert dreamed(lambda: os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=number)), allow=allow).blocked == []
    assert (scratch / "new").exists()
    os.close(number)


def test_a_signal_handler_that_an_episode_sets_is_guarded_whenever_it_runs(tmp_path: Path) -> None:
    """One that `setitimer` brings later, say."""
    before = signal.getsignal(signal.SIGUSR2)
    assert dreamed(lambda: bool(signal.signal(signal.SIGUSR2, lambda *_: os.mkdir(tmp_path / "made")))).blocked == []
    with pytest.raises(RealAccessBlocked):
        os.kill(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    assert not (tmp_path / "made").exists()


def test_a_pipe_of_the_episode_s_own_is_nothing_real() -> None:
    def through_a_pipe() -> bytes:
        reads, writes = os.pipe()
        os.write(writes, b"x")
        os.close(writes)
        with open(reads, "rb") as file:
            return file.read()

    episode = dreamed(through_a_pipe)
    assert episode.blocked == [] and episode.state["result"] == b"x"  # type: ignore[attr-defined]


def test_work_of_a_thread_pool_that_is_stopped_does_not_keep_its_caller_waiting(tmp_path: Path) -> None:
    def work() -> None:
        with ThreadPool(1) as pool:
            pool.map(os.mkdir, [tmp_path / "made"])

    graph = node_of(work)
    with (
        pytest.raises(RealAccessBlocked),
        simulated(graph, policy=ScriptedPolicy(), environment=Answers(), task=TASK) as episode,
    ):
        episode.invoke({"result": None})
    assert not (tmp_path / "made").exists()
