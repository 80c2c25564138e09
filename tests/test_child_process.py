"""Processes of this library's own: what they answer, how they end, and what their end says."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dreamgym_lg.child_process import Child
from dreamgym_lg.errors import ProcessLost

MAIN = """
import os, pickle, sys, time

def main(requests, replies):
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            open(__file__ + ".ended", "w").close()
            return
        print("words of a library")  # no reply
        os.write(1, b"words of its C code")
        reply = getattr(sys.modules["os"], "getcwd")() if request == "where" else request
        if request == "raise":
            reply = LookupError("not here")
        elif request == "half":
            os.write(replies.fileno(), pickle.dumps("x" * 10_000)[:5000])
            os._exit(3)
        elif request == "sleep":
            time.sleep(60)
        elif request == "variable":
            reply = os.environ["SOME_VARIABLE"], os.environ["OMP_WAIT_POLICY"]
        pickle.dump(reply, replies)
        replies.flush()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "answers.py").write_text(MAIN)
    return tmp_path / "answers.py"


@pytest.fixture
def child(file: Path) -> Iterator[Child]:
    child = Child(file, name="the process of the test", advice="start it again", environment={"SOME_VARIABLE": "here"})
    yield child
    child.kill()


def test_it_answers_and_what_it_prints_is_no_answer(child: Child) -> None:
    assert child.ask({"a": [1, 2]}) == {"a": [1, 2]}
    assert child.ask("variable") == ("here", "PASSIVE")
    child.send("first")
    child.send("second")
    assert (child.receive(), child.receive()) == ("first", "second")


def test_the_main_of_a_module_is_run_with_this_processs_path(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))
    child = Child("answers", name="it")
    assert child.ask(7) == 7
    child.kill()


def test_an_exception_that_it_sends_is_raised_and_it_goes_on(child: Child) -> None:
    with pytest.raises(LookupError, match="not here"):
        child.ask("raise")
    assert child.ask(1) == 1


def test_callers_take_turns(child: Child) -> None:
    replies: dict[int, int] = {}
    threads = [threading.Thread(target=lambda i=i: replies.update({i: child.ask(i)})) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {i: i for i in range(20)}


def test_a_message_that_cannot_be_pickled_is_not_sent_in_part(child: Child) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="pickle"):
        child.send(["x" * 100_000, lambda: None])
    assert child.ask(1) == 1


def test_its_end_says_what_to_do(child: Child) -> None:
    assert child.ask(1) == 1
    os.kill(child.process.pid, signal.SIGKILL)
    for call in (lambda: child.ask(1), lambda: child.send(1), child.receive):
        with pytest.raises(ProcessLost, match="the process of the test has ended .status -9.*; start it again"):
            call()


def test_an_end_in_the_middle_of_a_reply_is_an_end(child: Child) -> None:
    with pytest.raises(ProcessLost, match="status 3"):
        child.ask("half")


def test_it_is_killed_when_no_reply_comes_in_time(child: Child) -> None:
    assert child.ask(1, timeout=60) == 1
    with pytest.raises(ProcessLost, match="status -9"):
        child.ask("sleep", timeout=0.2)


def test_it_ends_with_its_last_user(file: Path) -> None:
    child = Child(file, name="it")
    process = child.process
    child.ask(1)
    del child
    assert process.poll() == -signal.SIGKILL


def test_with_patience_it_may_end_by_itself(file: Path) -> None:
    child = Child(file, name="it", patience=60)
    child.ask(1)
    child.kill()
    assert child.process.returncode == 0 and file.with_name("answers.py.ended").exists()


def test_it_ends_where_its_parent_was_killed(file: Path) -> None:
    parent = (
        "import sys, time\nfrom pathlib import Path\nfrom dreamgym_lg.child_process import Child\n"
        "child = Child(Path(sys.argv[1]), name='it')\nprint(child.process.pid, child.ask(1), flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent, str(file)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[0])
        process.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]:
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.05)
