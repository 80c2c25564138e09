"""Ordinary agents, as users write them, for `test_walled_agent`: imported in a worker, behind the wall, and never here."""

import ctypes
import os
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
