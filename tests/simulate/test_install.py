"""What is patched in a process: for production the models and tools alone, for a dream the guard too."""

import subprocess
import sys
from pathlib import Path

import pytest

PRODUCTION = """
import builtins, io, logging, multiprocessing.process, os, socket, ssl, subprocess, sys, threading
from asyncio import BaseEventLoop
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from langchain_core.language_models import FakeListChatModel
from langgraph.graph import START, MessagesState, StateGraph

sys.path.insert(0, sys.argv[1])
from worlds import Answers
from dreamgym_lg.simulate import RealAccessBlocked, simulated, with_policy

OWNERS = [
    os, io, builtins, subprocess, socket, socket.socket, ssl.SSLSocket, subprocess.Popen, threading, threading.Thread,
    ThreadPoolExecutor, ProcessPoolExecutor, BaseEventLoop, multiprocessing.process.BaseProcess, logging.Handler,
]
hooks = []
add_hook = sys.addaudithook
sys.addaudithook = lambda hook: (hooks.append(hook), add_hook(hook))
before = [dict(vars(owner)) for owner in OWNERS]


def patched():
    names = []
    for owner, was in zip(OWNERS, before):
        now = vars(owner)
        names += [f"{owner.__name__}.{name}" for name in was.keys() | now.keys() if was.get(name) is not now.get(name)]
    return names


model, policy = FakeListChatModel(responses=["production"]), FakeListChatModel(responses=["policy"])
node = lambda state: {"messages": [model.invoke("hello")]}
graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
assert with_policy(graph, policy).invoke({"messages": []})["messages"][-1].text == "policy"
assert (patched(), hooks) == ([], []), (patched(), hooks)

act = StateGraph(dict).add_node("node", lambda state: {"pid": os.system("true")}).add_edge(START, "node").compile()
try:
    with simulated(act, policy=policy, environment=Answers()) as episode:
        episode.invoke({"pid": 0})
    raise SystemExit("the guard does not stand")
except RealAccessBlocked:
    pass
assert len(hooks) == 1 and {"os.write", "socket.send", "Thread.start", "ThreadPoolExecutor.submit"} <= set(patched()), patched()
assert with_policy(graph, policy).invoke({"messages": []})["messages"][-1].text == "policy" and os.system("true") == 0
"""


@pytest.mark.slow
def test_production_patches_no_guard_and_a_later_dream_does() -> None:
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", PRODUCTION, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
