"""Training with two processes, which torchrun starts: it equals one, and a killed one loses nothing."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import create_model, create_tokenizer

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.sft import save_model
from dreamgym_lg.replay.buffer import ReplayBuffer

HERE = Path(__file__).parent


SCRIPTS = [str(HERE), str(HERE / "tiny"), str(HERE / "integrations" / "trl")]


def by_two(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The script run by two processes; fails instead of hanging."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SCRIPTS), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", script, *arguments]
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(name="by_one")
def _by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], Any]:
    """Runs the script in this process."""
    monkeypatch.setattr(sys, "path", [*SCRIPTS, *sys.path])
    return lambda script, folder: importlib.import_module(script).main(folder)


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).norm() / one.norm())


@pytest.mark.slow
def test_two_processes_learn_what_one_does(by_one: Callable[[str, Path], Any], tmp_path: Path) -> None:
    """Every loss and learner; rows of one episode, and passes of one row, on different processes."""
    folders = one, two = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    by_one("shared_training", one)
    done = by_two("shared_training", two)
    assert done.returncode == 0, done.stderr
    found = {path.stem: [torch.load(folder / path.name) for folder in folders] for path in one.glob("*.pt")}
    assert {"grpo", "dapo", "cispo", "dr_grpo", "lora", "ppo", "dpo"} == found.keys()
    for name, (alone, shared) in found.items():
        assert distance(alone["moved"], shared["moved"]) <= 1e-5, name
        for expected, metrics in zip(alone["metrics"], shared["metrics"], strict=True):
            assert comparable(metrics) == pytest.approx(comparable(expected), rel=1e-4, abs=1e-6), name


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Without the seconds, and without means of what each forward pass had at least or at most."""
    return {name: value for name, value in metrics.items() if not name.endswith(("_time", "_min", "_max"))}


def weights(folder: Path) -> torch.Tensor:
    named = LocalChatModel.from_path(folder).model.named_parameters()
    return torch.cat([values.detach().flatten() for _, values in named])


def episodes(folder: Path) -> list[tuple[Any, ...]]:
    """What the rollouts of a training recorded."""
    found = ReplayBuffer(folder / "replay.db").trajectories(source="synthetic", segments=True)
    played = [each for each in found if each.run.endswith("train")]
    return [(e.task.id, e.iteration, e.rollout_index, [list(s.token_ids) for s in e.segments]) for e in played]


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_the_same_command_goes_on(by_one: Callable[[str, Path], Any], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    tokenizer = create_tokenizer(["Book a room.", "You book rooms."], vocab_size=320)
    save_model(create_model(tokenizer, hidden_size=32, layers=1, max_tokens=2048), tokenizer, tmp_path / "start")
    for folder in (one, two):
        folder.mkdir()
    by_one("gym_of_ranks", one)

    killed = by_two("gym_of_ranks", two, "KILLED")
    assert killed.returncode != 0
    assert "another process of this training has died" in killed.stderr or "rank 0 was ended (SIGTERM)" in killed.stderr
    assert "rank      : 1 (local_rank: 1)" in killed.stderr and "SIGKILL" in killed.stderr, "the launcher says which"
    assert len(episodes(two)) == 2 * 2 * 4, "it was in the second of three iterations"

    resumed = by_two("gym_of_ranks", two)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("evaluated 2 episodes") == 1, "after the training, rank 0 is alone"
    assert episodes(two) == episodes(one), "nothing is played twice, and one process would have played the same"
    start_weights, trained = weights(tmp_path / "start"), [weights(each / "run" / "models" / "trained") for each in (one, two)]
    assert distance(trained[0] - start_weights, trained[1] - start_weights) <= 1e-5
    assert (two / "exported").is_dir()
