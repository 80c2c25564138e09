"""A model is fine-tuned in a process of its own, while this one does something else."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_parts import QUESTION, WORDS, model_of
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.child_process import Child
from dreamgym_lg.errors import NothingToTrain, ProcessLost
from dreamgym_lg.integrations.trl import sft_process
from dreamgym_lg.integrations.trl.rows import tokenize
from dreamgym_lg.integrations.trl.sft import fine_tune, save_model
from dreamgym_lg.integrations.trl.sft_process import fine_tune_beside

PARENT = """
import pickle, sys, time, torch
from dreamgym_lg.integrations.trl import sft_process
class Told(sft_process.Child):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        print(self.process.pid, flush=True)
sft_process.Child = Told
torch.set_num_threads(2)
with open(sys.argv[1], "rb") as file:
    start, rows = pickle.load(file)
options = {"steps": 10**6, "on_step": lambda step, loss: print(step, flush=True)}
sft_process.fine_tune_beside(lambda: time.sleep(600), start, sys.argv[1] + "-to", rows, **options)
"""


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    save_model(model_of(tokenizer), tokenizer, tmp_path / "start")
    return tmp_path / "start"


@pytest.fixture
def rows(tokenizer: PreTrainedTokenizerFast) -> Any:
    return tokenize(tokenizer, [[QUESTION, {"role": "assistant", "content": word}] for word in WORDS])


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> "list[subprocess.Popen[bytes]]":
    """The processes that are started."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(Child):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self.process)

    monkeypatch.setattr(sft_process, "Child", Noted)
    return started


def test_it_trains_as_it_would_here_while_something_else_is_done(
    start: Path, rows: Any, tmp_path: Path, children: "list[subprocess.Popen[bytes]]"
) -> None:
    stepped, threads, steps = threading.Event(), list[int](), list[int]()

    def on_step(step: int, loss: float) -> None:
        steps.append(step)
        stepped.set()

    def meanwhile() -> None:
        threads.append(torch.get_num_threads())
        assert b"\0OMP_NUM_THREADS=1\0" in Path(f"/proc/{children[0].pid}/environ").read_bytes()
        assert stepped.wait(100), "the process trains now, not afterwards"

    ended = list[bool]()

    def on_end() -> None:
        ended.append((tmp_path / "there" / "model.safetensors").exists())

    options: dict[str, Any] = {"steps": 3, "batch_size": 2, "seed": 4}
    loss = fine_tune_beside(meanwhile, start, tmp_path / "there", rows, on_step=on_step, on_end=on_end, **options)
    assert (steps, threads, torch.get_num_threads(), ended) == ([1, 2, 3], [1], 2, [True])
    torch.set_num_threads(1)
    assert fine_tune(start, tmp_path / "here", rows, **options) == pytest.approx(loss, rel=1e-5)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("here", "there")]
    assert weights[0] == weights[1]


def test_with_one_thread_nothing_is_done_meanwhile(start: Path, rows: Any, tmp_path: Path, children: list[Any]) -> None:
    """The caller does it afterwards."""
    torch.set_num_threads(1)
    fine_tune_beside(pytest.fail, start, tmp_path / "to", rows, steps=1, on_step=lambda *_: None)
    assert (tmp_path / "to" / "model.safetensors").exists() and not children


def test_what_it_raises_is_raised_here(start: Path, tmp_path: Path, rows: Any) -> None:
    unlearned = [{**row, "labels": [-100] * len(row["labels"])} for row in rows]
    done = list[bool]()
    with pytest.raises(NothingToTrain, match=f"none of the {len(rows)} rows has a token to learn"):
        fine_tune_beside(lambda: done.append(True), start, tmp_path / "to", unlearned, steps=1, on_step=pytest.fail)
    assert done and torch.get_num_threads() == 2


def test_it_is_ended_where_what_is_done_meanwhile_fails(
    start: Path, rows: Any, tmp_path: Path, children: "list[subprocess.Popen[bytes]]"
) -> None:
    with pytest.raises(ZeroDivisionError):
        fine_tune_beside(lambda: print(1 / 0), start, tmp_path / "to", rows, steps=10**6, on_step=lambda *_: None)
    assert children[0].returncode == -signal.SIGKILL and torch.get_num_threads() == 2
    assert not (tmp_path / "to").exists()


def test_a_killed_process_says_so(start: Path, rows: Any, tmp_path: Path, children: "list[subprocess.Popen[bytes]]") -> None:
    def kill() -> None:
        os.kill(children[0].pid, signal.SIGKILL)

    with pytest.raises(ProcessLost, match="supervised training has ended .status -9.*run the same command once more"):
        fine_tune_beside(kill, start, tmp_path / "to", rows, steps=10**6, on_step=lambda *_: None)


def test_it_does_not_outlive_a_killed_parent(start: Path, rows: Any, tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(pickle.dumps((start, rows)))
    command = [sys.executable, "-c", PARENT, str(tmp_path / "given")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, first = int(parent.stdout.readline()), parent.stdout.readline()
    assert first == "1\n", "it trains"
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]:
        assert time.monotonic() < deadline, "the child is still there"
        time.sleep(0.05)
