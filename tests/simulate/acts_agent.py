"""An agent whose node plays an act of `wall_acts`, the one that its task names; and, as a script, its episodes under the guard.

`python acts_agent.py SOCKET` plays those that it is told, each in a fork: nothing but the guard is between them and the world.
"""

import atexit
import json
import os
import socket
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import wall_acts
from langgraph.graph import START, MessagesState, StateGraph

from dreamgym_lg.simulate import Allow, simulated
from dreamgym_lg.types import Task


def act(state: MessagesState) -> dict[str, Any]:
    order = json.loads(state["messages"][-1].text)
    scene = SimpleNamespace(**order["scene"] | {"scratch": os.environ["TMPDIR"]})
    wall_acts.ACTS[order["name"]].play(scene)
    return {"messages": []}


agent = StateGraph(MessagesState).add_node("act", act).add_edge(START, "act").compile()


def task_of(name: str, scene: dict[str, Any]) -> Task:
    return Task(id=name, instruction=json.dumps({"name": name, "scene": scene}), environment="acts")


def play_guarded(name: str, scene: dict[str, Any]) -> None:
    allow, task = Allow(paths=[scene["scratch"]]), task_of(name, scene)
    print("began", flush=True)
    try:
        with simulated(agent, policy=ScriptedPolicy(), environment=Answers(), task=task, allow=allow) as episode:
            episode.invoke({"messages": [("user", task.instruction)]})
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    os._exit(0)  # to tear down all that was imported takes seconds


if __name__ == "__main__":
    from worlds import Answers
    from zoo.policy import ScriptedPolicy

    with simulated(agent, policy=ScriptedPolicy(), environment=Answers()):
        pass  # the guard is installed once, and in all forks
    with suppress(ValueError):  # no order comes any more
        wall_acts.serve(socket.socket(fileno=int(sys.argv[1])), play_guarded)
