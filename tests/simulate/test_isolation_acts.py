"""Every act of `wall_acts` as a whole episode: none has an effect under isolation="process"; these have under "guard"."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path

import pytest
from acts_agent import task_of
from test_wall import Scene, _can, scene
from wall_acts import ACTS
from worlds import Answers
from zoo import KINDS
from zoo.policy import ScriptedPolicy

from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate.wall import worker
from dreamgym_lg.simulate.wall.agent import WalledAgent, Workers
from dreamgym_lg.simulate.wall.wall import missing_for_wall

AGENT = Path(__file__).with_name("acts_agent.py")


def slow_with_a_wall(test: Callable[..., None]) -> Callable[..., None]:
    without = pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")
    return pytest.mark.slow(without(test))


PAST_THE_GUARD = {
    *("arrow_stream", "duckdb_file", "fchmodat2", "file_attributes", "file_setattr", "io_priority_of_others"),
    *("io_uring_setxattr", "uvloop_connection"),
    *("key_ring", "libc_chmod", "libc_connect", "libc_creat", "libc_fopen", "libc_kill", "libc_open", "libc_rename"),
    *("libc_sends_udp", "libc_system", "libc_truncate", "libc_unlink", "limits_of_others", "memory_written"),
    *("message_queue", "messages_sysv", "mount", "openat2", "own_affinity_of_others", "parquet", "priority_of_others"),
    *("ptrace", "readline_history", "safetensors_save", "scheduling_of_others", "semaphore_sysv", "setxattrat"),
    *(
        "at_exit",
        "shared_memory",
        "shared_memory_sysv",
        "sigio",
        "sqlite_attach",
        "sqlite_vacuum_into",
        "sigqueue",
        "tokenizers_save",
        "torch_save",
    ),
}
"""The acts that isolation="guard" cannot stop."""
SILENT = {
    "libc_system": "the shell says it by its exit status, which the act ignores",
    "at_exit": "it never comes to that: a worker is killed",
    **dict.fromkeys(("libc_chmod", "fchmodat2"), "modes stay as they are, and the call succeeds: files are copied in scratch"),
}
"""Acts that the wall stops and that say nothing of it, with the reason."""
OF_ITS_OWN = {"inherited_file", "inherited_socket"}
"""Write to a number that was closed, which may be a pipe that another act has left open in the worker."""


def test_the_documentation_says_how_many() -> None:
    root = Path(__file__).parents[2]
    for page in ("README.md", "docs/concepts/wall.md"):
        text = (root / page).read_text()
        assert f"| of our {len(ACTS)} side effects |" in text and f"| {len(PAST_THE_GUARD)} get through" in text
    everything = all(map(find_spec, ("deepagents", "langgraph_supervisor", "langgraph_swarm", "langchain_mcp_adapters")))
    played = (root / "docs/concepts/simulated-agents.md").read_text()
    assert f"{len(KINDS)} kinds of agents" in played or not everything


def outcomes(folder: Path, play: Callable[[str, Scene], str], expected: Collection[str]) -> tuple[set[str], dict[str, str]]:
    """Of the acts that can be played here: those with an effect, and what each said."""
    happened, said = set[str](), dict[str, str]()
    for number, (name, act) in enumerate(ACTS.items()):
        if _can(act.needs):
            with scene(folder / str(number)) as world:  # a socket's path has at most 107 bytes
                before = world.seen()
                said[name] = play(name, world)
                if world.changed(before, expected=name in expected):
                    happened.add(name)
    assert len(said) >= 120, "most acts were left out: their packages are missing"
    return happened, said


@slow_with_a_wall
def test_nothing_happens_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SILENCE", 60.0)
    workers = Workers(f"{AGENT}:agent", count=1)
    agent = WalledAgent(workers, ScriptedPolicy())

    def play(name: str, world: Scene) -> str:
        task = task_of(name, json.loads(world.description.read_text()))
        (episode,) = asyncio.run(rollout(agent, [task], Answers, source="synthetic"))
        return episode.error or ""

    try:
        happened, said = outcomes(tmp_path, play, expected=())
    finally:
        workers.close()
    print("\n".join(f"{name}: {text[:200]}" for name, text in said.items()))
    assert happened == set()
    assert {name for name, text in said.items() if not text} - OF_ITS_OWN == SILENT.keys() & said.keys()


@slow_with_a_wall
def test_what_the_guard_stops_and_what_it_cannot(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(AGENT), str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment):
        theirs.close()
        happened, said = outcomes(tmp_path, lambda name, world: world.play(name, ours, walled=False), PAST_THE_GUARD)
        ours.close()
    assert all(text.startswith("began") for text in said.values()), said
    print("past the guard:", ", ".join(sorted(happened)))
    assert happened == PAST_THE_GUARD & said.keys()
    stopped = {name for name, text in said.items() if "RealAccessBlocked" in text}
    assert stopped | PAST_THE_GUARD >= said.keys(), "each act is stopped, or is among those that are not"
