"""Ordinary agents, as users write them, for `test_walled_agent`: imported in a worker, behind the wall, and never here."""

import asyncio
import contextlib
import ctypes
import os
import queue
import threading
from concurrent.futures import Future
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from zoo.models import ScriptedModel

LIBC = ctypes.CDLL(None)
"""Whose calls the guard does not see."""

OUTSIDE = os.environ.get("WALLED_OUTSIDE", "")


@tool
def search(query: str) -> str:
    """Look for rooms."""
    Path(OUTSIDE, "searched").write_text(query)
    return "real"


@tool
def book(room: str) -> str:
    """Book a room."""
    Path(OUTSIDE, "booked").write_text(room)
    return "real"


def agent():  # type: ignore[no-untyped-def]
    """Production's model would call nothing: whoever calls a tool is the policy."""
    return create_agent(ScriptedModel(label="production"), [search, book])


def prompted():  # type: ignore[no-untyped-def]
    return create_agent(ScriptedModel(label="production"), [search, book], system_prompt="You book rooms.")


def _node(act):  # type: ignore[no-untyped-def]
    def node(state: MessagesState) -> dict:
        act()
        return {"messages": []}

    return StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()


def native() -> None:
    """Below Python, where the guard sees nothing."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).creat(os.path.join(OUTSIDE, "native").encode(), 0o600) < 0:
        raise RuntimeError(f"creat: {os.strerror(ctypes.get_errno())}")


writes = _node(native)


def swallow_pythons() -> None:
    for swallowed in (Exception, BaseException):
        with contextlib.suppress(swallowed):
            Path(OUTSIDE, "python").write_text("x")


def swallow_natives() -> None:
    import sqlite3

    with contextlib.suppress(Exception), contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute("ATTACH ? AS other", (os.path.join(OUTSIDE, "attached.db"),)).execute("CREATE TABLE other.t (a)")
    with contextlib.suppress(Exception):
        native()


swallows_pythons = _node(swallow_pythons)
swallows_natives = _node(swallow_natives)


def post() -> None:
    import urllib.request

    urllib.request.urlopen(f"http://127.0.0.1:{os.environ['WALLED_PORT']}/", b"x").read()


posts = _node(post)


def logs():  # type: ignore[no-untyped-def]
    """Opens its log as it is made."""
    Path(OUTSIDE, "log").touch()


def last_words() -> None:
    print("last words", flush=True)
    os._exit(3)


def _is_pipe(number: int) -> bool:
    """One that can be written: the worker's own, to its parent."""
    path = f"/proc/self/fd/{number}"
    return os.path.exists(path) and os.readlink(path).startswith("pipe:") and os.lstat(path).st_mode & 0o200 > 0


def temporary() -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")


writes_temporary = _node(temporary)
dies = _node(last_words)


def _babble(text: bytes) -> None:
    for number in filter(_is_pipe, range(3, 10)):
        LIBC.write(number, text, len(text))


babbles = _node(lambda: _babble(b"no json\n"))
babbles_json = _node(lambda: _babble(b"5\n"))
guarded = _node(lambda: Path(OUTSIDE, "written").write_text("x"))


class BudgetExceeded(Exception):
    """The agent's own, of a name that this library has too."""


def overspend() -> None:
    raise BudgetExceeded("the customer's")


overspends = _node(overspend)


async def _streamed(state: MessagesState) -> dict:
    model, messages = ScriptedModel(label="production"), state["messages"]
    chunks = [chunk.text async for chunk in model.astream(messages)]
    second = [event async for event in model.astream_events(messages, version="v2")]
    third = [event async for event in await model.astream_events(messages, version="v3")]
    tokens = [event["data"]["chunk"].text for event in second if event["event"] == "on_chat_model_stream"]
    return {"messages": [AIMessage(f"{len(chunks)} {''.join(tokens)} {len(tokens)} {len(third)}")]}


def _streamed_by_hand(state: MessagesState) -> dict:
    return {"messages": [AIMessage(str(len(list(ScriptedModel(label="production").stream(state["messages"])))))]}


streams = StateGraph(MessagesState).add_node("node", _streamed).add_edge(START, "node").compile()
streams_synchronously = StateGraph(MessagesState).add_node("node", _streamed_by_hand).add_edge(START, "node").compile()


def own_permission() -> None:
    raise PermissionError("not your order")


def in_scratch() -> None:
    """Copies and changes modes there, works in a pool of threads, and has locks, a queue and a pipe of its own."""
    import multiprocessing
    import shutil
    import tempfile
    from multiprocessing.pool import ThreadPool

    source = Path(tempfile.mkdtemp()) / "file"
    source.write_text("x")
    shutil.copy(source, source.with_name("copy"))
    os.chmod(source, 0o600)
    with ThreadPool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
    lock, again, two, event = (
        multiprocessing.Lock(),
        multiprocessing.RLock(),
        multiprocessing.BoundedSemaphore(2),
        multiprocessing.Event(),
    )
    with lock:
        assert not lock.acquire(timeout=0.01)
    with again, again:
        event.set()
    assert event.wait(1) and two.acquire() and two.acquire() and not two.acquire(block=False) and two.get_value() == 0
    two.release()
    queue = multiprocessing.Queue()
    queue.put("x")
    assert queue.get(timeout=5) == "x"
    queue.close()
    read, write = os.pipe()
    os.write(write, b"x")
    assert os.read(read, 1) == b"x"


def leaves_a_child() -> None:
    LIBC.system(b"setsid sleep 6161 &")
    raise RuntimeError("\x1b[31mof mine")


own_permissions = _node(own_permission)
works_in_scratch = _node(in_scratch)
leaves = _node(leaves_a_child)


def _attempts() -> list:
    """Ways to what is in the buffer, or to a lock of it; none of them is known to the guard."""
    path = os.environ["WALLED_BUFFER"].encode()
    folder, scratch = os.path.dirname(path), os.environ["TMPDIR"].encode()
    link = os.path.join(scratch, b"link")
    os.path.lexists(link) or os.symlink(path, link)
    ways = [path + end for end in (b"", b"-wal", b"-shm", b"-journal")]
    ways += [path.removesuffix(b".db") + b"-answers.db"]
    ways += [link, b"/proc/self/root" + path, os.path.join(folder, b"zoo/..", os.path.basename(path))]
    ways += [os.path.join(b"/proc/%d/root" % os.getppid(), path[1:])]
    opens = [lambda way=way: LIBC.open(way, os.O_RDONLY) for way in ways]
    opens += [lambda: LIBC.open(path, os.O_WRONLY), lambda: LIBC.open(path, os.O_RDWR)]
    hidden = LIBC.open(path, os.O_PATH)  # says where it is, and lets nothing be done with it
    opens += [
        lambda: LIBC.flock(hidden, 1),
        lambda: LIBC.fcntl(hidden, 1024, 0),
        lambda: LIBC.open(b"/proc/self/fd/%d" % hidden, 0),
    ]
    opens += [lambda: LIBC.link(path, scratch + b"/hard"), lambda: LIBC.rename(path, scratch + b"/moved")]
    opens += [lambda: LIBC.openat(LIBC.open(folder, os.O_RDONLY), os.path.basename(path), os.O_RDONLY)]
    return [*opens, lambda: LIBC.system(b"cat %s > $TMPDIR/copy && test -s $TMPDIR/copy" % path) and -1]


def read_what_is_hidden() -> None:
    import secrets  # modules beside the buffer, and Python's, are read on

    import zoo.hostile_acts

    assert secrets and zoo.hostile_acts and os.listdir(os.path.dirname(os.environ["WALLED_BUFFER"]))
    attempts = _attempts()
    raise RuntimeError(f"refused {sum(each() < 0 for each in attempts)} of {len(attempts)}")


reads_what_is_hidden = _node(read_what_is_hidden)


def _take(state: MessagesState) -> dict:
    kind, scratch = state["messages"][-1].text, Path(os.environ["TMPDIR"])
    for _ in range(60 if kind.startswith("forks") else 0):
        LIBC.system(b"setsid sleep 6161 &" if kind == "forks_in_sessions" else b"sleep 6161 &")
    for number in range(300 if kind == "writes_many" else 0):
        (scratch / str(number)).touch()
    if kind == "writes_much":
        (scratch / "much").write_bytes(b"x" * 2**21)
    if kind.startswith(("forks", "writes")):
        LIBC.sleep(60)
    return {"messages": []}


takes_by_turns = StateGraph(MessagesState).add_node("node", _take).add_edge(START, "node").compile()


# --- workers that a queue feeds ------------------------------------------------------------------------------------------


def _queue_worker(*, lazy: bool):  # type: ignore[no-untyped-def]
    """A thread that does what a queue brings, as clients of rate-limited services have."""
    jobs: queue.Queue = queue.Queue()

    def serve() -> None:
        while True:
            work, done = jobs.get()
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

    thread, birth = threading.Thread(target=serve, daemon=True), threading.Lock()
    lazy or thread.start()

    def hand_over(work):  # type: ignore[no-untyped-def]
        with birth:
            thread.ident or thread.start()
        done: Future = Future()
        jobs.put((work, done))
        return done.result(20)

    def node(state: MessagesState) -> dict:
        model = ScriptedModel(label="production")
        reply = hand_over(lambda: model.bind_tools([book]).invoke(state["messages"]))
        results = [hand_over(lambda call=call: book.invoke(call)) for call in reply.tool_calls]
        return {"messages": [reply, *results, hand_over(lambda: model.invoke([*state["messages"], reply, *results]))]}

    return StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()


queue_worker_born_before = _queue_worker(lazy=False)
queue_worker_born_lazily = _queue_worker(lazy=True)


class Batcher:
    """A task, born with the first call on each loop, that asks the model for what has come."""

    def __init__(self, model) -> None:  # type: ignore[no-untyped-def]
        self.model, self.loop = model, None

    async def __call__(self, messages):  # type: ignore[no-untyped-def]
        if self.loop is not asyncio.get_running_loop():
            self.loop, self.jobs = asyncio.get_running_loop(), asyncio.Queue()
            self.task = asyncio.create_task(self.serve())
        done = asyncio.get_running_loop().create_future()
        await self.jobs.put((messages, done))
        return await done

    async def serve(self) -> None:
        while True:
            messages, done = await self.jobs.get()
            try:
                done.set_result((await self.model.abatch([messages]))[0])
            except Exception as error:
                done.set_exception(error)


def _batched():  # type: ignore[no-untyped-def]
    model = ScriptedModel(label="production")
    think, tell = Batcher(model.bind_tools([book])), Batcher(model)

    async def node(state: MessagesState) -> dict:
        reply = await think(state["messages"])
        results = [await book.ainvoke(call) for call in reply.tool_calls]
        return {"messages": [reply, *results, await tell([*state["messages"], reply, *results])]}

    return StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()


task_born_lazily = _batched()
