"""Set before anything is imported; pyproject.toml's pytest options close the network."""

import os
import shutil

# Images of Python often set it: each process that a test starts then compiles torch and transformers anew, in eight seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.update(
    HF_HUB_OFFLINE="1",  # a model or data set that is not on disk is an error, not a download
    TOKENIZERS_PARALLELISM="false",  # no warning when a test starts a process
    OMP_WAIT_POLICY="PASSIVE",  # idle torch threads sleep: two cores are shared with the test itself
)
os.environ.update({"OMP_NUM_THREADS": "1"} if "PYTEST_XDIST_WORKER" in os.environ else {})  # a worker has one core
# of processes that tests start; of this one, pytest's option
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [f"{os.path.dirname(__file__)}/tiny", os.environ.get("PYTHONPATH")]))
# in memory, where there is enough: on a disk each commit of SQLite waits for it, 0.05 s for a new buffer alone
if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
os.environ.pop("COLUMNS", None)  # pytest-xdist gives its workers one, which rich would keep from its import on

import asyncio
import gc
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field

from dreamgym_lg.replay.buffer import ReplayBuffer

SHARED = {
    "tests/cli/test_app.py": "run",
    "tests/cli/test_play.py": "run",
    "tests/experiment/test_demo.py": "run",
    "tests/fidelity/test_report.py": "run",
    "tests/test_docs.py::test_python_blocks_of_a_finished_experiment_run": "run",
    "tests/hosted/test_transformers_serve.py": "server",
    "tests/integrations/transformers/test_contract.py": "process",
    "tests/integrations/transformers/test_process.py": "process",
    "tests/test_packaging.py": "wheel",
    "tests/test_support_desk.py": "desk",
    "tests/compiled/test_compiled.py": "compiled",
    "tests/test_serving.py": "exported",
}
"""Tests that share a fixture that takes seconds, by the beginnings of their ids: under pytest-xdist those of one group run in
the same worker."""
_FOLDERS = tuple(f"tests/integrations/{name}" for name in ("alfworld", "browsergym", "textworld_express", "webshop"))
"""The same for all files of a folder."""

sys.dont_write_bytecode = False  # pytest keeps its rewritten tests
gc.disable()  # until everything is imported and collected: it finds nothing, and walks through all again and again


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Under pytest-xdist the long tests come first, so that the workers end together."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        """One worker for each group of `SHARED`; every other test is on its own."""

        def _split_scope(self, nodeid: str) -> str:
            folder = next((each for each in _FOLDERS if nodeid.startswith(each)), nodeid)
            return next((group for shared, group in SHARED.items() if nodeid.startswith(shared)), folder)

    return Groups(config, log)


def pytest_collection_finish() -> None:
    gc.set_threshold(50_000, *gc.get_threshold()[1:])  # as a rollout has it, which then leaves it alone
    gc.enable()


_ran = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Leave what is imported out of garbage collection: each start of TRL's trainers collects, which took 0.3 to 0.6 s."""
    if next(_ran) % 50 == 0:  # for tests import more
        gc.collect()
        gc.freeze()


class ScriptedModel(BaseChatModel):
    """A chat model that replies by a function of the prompt. It lets other tasks run before it answers."""

    reply: Callable[[list[BaseMessage]], str]
    asked: list[list[BaseMessage]] = Field(default_factory=list)
    """Every prompt, in order."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.asked.append(list(messages))
        return ChatResult(generations=[ChatGeneration(message=AIMessage(self.reply(messages)))])

    async def _agenerate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        await asyncio.sleep(0)
        return self._generate(messages)


def asked_action(messages: list[BaseMessage]) -> str:
    """The action that an experience model's prompt asks about."""
    return [line[2:] for line in messages[-1].text.split("\n") if line.startswith("> ")][-1]


def door_world(messages: list[BaseMessage]) -> str:
    """The experience model of a world of two steps: `open door`, then `go north`; `jump` fails it."""
    open_already = any(message.type == "ai" and "The door is open." in message.text for message in messages)
    match asked_action(messages), open_already:
        case "open door", False:
            return "valid, it brings progress\nreward 0.5, continues\nThe door is open."
        case "go north", True:
            return "valid, it completes the task\nreward 0.5, success\nYou are outside."
        case "go north", False:
            return "valid, no progress yet\nreward 0, continues\nThe door is closed."
        case "jump", _:
            return "valid, it fails the task\nreward 0, failure\nYou broke a leg."
    return "invalid, it is not understood\nreward 0, continues\nWhat?"


@pytest.fixture(name="scripted", scope="session")
def _scripted() -> type[ScriptedModel]:
    return ScriptedModel


@pytest.fixture(name="asked_action", scope="session")
def _asked_action() -> Callable[[list[BaseMessage]], str]:
    return asked_action


@pytest.fixture(name="door_world", scope="session")
def _door_world() -> Callable[[list[BaseMessage]], str]:
    return door_world


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `dreamgym demo` leaves of `small_run.py`, killed in training and started again by the same line.

    Beside it, in `killed.json`: the episodes of training that were stored after the kill of the running process.
    """
    out = tmp_path_factory.mktemp("finished") / "run"
    experiment = f"{os.path.dirname(__file__)}/tiny/small_run.py:create_experiment"
    command = [sys.executable, "-m", "dreamgym_lg.cli.app", "demo", experiment, "--out", str(out)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_training(out / "replay.db", process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "three iterations last longer than that"
    with ReplayBuffer(out / "replay.db") as buffer:
        killed = [(t.iteration, t.task.id, t.rollout_index) for t in buffer.trajectories(run="train")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "report: " in done.stdout
    (out.parent / "killed.json").write_text(json.dumps(killed))
    return out


def _wait_for_training(file: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has stored some episodes of training."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it stored an episode"
        if file.exists() and file.stat().st_size:
            with ReplayBuffer(file) as buffer:
                if buffer.count("trajectories", run="train"):
                    return
        time.sleep(0.3)
    raise AssertionError("nothing was stored within ten minutes")
