"""Ordinary agents, as users write them, for `test_walled_agent`: imported in a worker, behind the wall, and never here."""

import ctypes
import os
from pathlib import Path

from langchain.agents import create_agent
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
