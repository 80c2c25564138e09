"""The learner after a crash: nothing counted is lost, nothing is done twice."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_parts import groups_of, learner_of, model_of, moments, promptly, some, trajectory, weights
from tiny_models import create_model
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.experience_models import policy_version
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.adapters import default_adapters
from dreamgym_lg.integrations.trl.learners import DPOLearner, GRPOLearner
from dreamgym_lg.integrations.trl.ppo import PPOLearner
from dreamgym_lg.integrations.trl.sft import save_model


def test_a_resumed_learner_goes_on_as_if_never_interrupted(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    start = weights(model)
    groups = [groups_of(model, i) for i in range(3)]
    learner = learner_of(model, tokenizer, tmp_path / "run")
    for iteration in range(2):
        learner.update(groups[iteration])
    middle, adam = weights(model), moments(learner)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    learner.update(groups[2])

    again = model_of(tokenizer)
    assert torch.equal(weights(again), start)
    resumed = learner_of(again, tokenizer, tmp_path / "copy")
    assert resumed.iteration == 2
    assert torch.equal(weights(again), middle)
    assert torch.equal(moments(resumed), adam)
    resumed.update(groups[2])
    assert resumed.iteration == 3
    assert (weights(again) - weights(model)).abs().max() < 1e-5
    assert (moments(resumed) - moments(learner)).abs().max() < 1e-5


def test_a_resumed_learner_knows_what_the_last_update_measured(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """A crash after the update and before the caller has noted its figures loses none of them."""
    model = model_of(tokenizer)
    learner = learner_of(model, tokenizer, tmp_path)
    measured = learner.update(groups_of(model, 1))
    again = learner_of(model, tokenizer, tmp_path)
    assert again.metrics == measured and measured["trainable_tokens"] > 0


def test_an_update_that_was_not_saved_is_repeated(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    groups = [groups_of(model, i) for i in range(2)]
    learner = learner_of(model, tokenizer, tmp_path)
    learner.update(groups[0])
    counted = (tmp_path / "training.pt").read_bytes()
    learner.update(groups[1])
    (tmp_path / "training.pt").write_bytes(counted)  # the crash came before the second took its place
    again = model_of(tokenizer)
    resumed = learner_of(again, tokenizer, tmp_path)
    assert resumed.iteration == 1
    resumed.update(groups[1])
    assert (weights(again) - weights(model)).abs().max() < 1e-5


def test_updates_that_were_not_saved_are_asked_for_again(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    groups = [groups_of(model_of(tokenizer), i) for i in range(5)]
    models = [model_of(tokenizer) for _ in range(2)]
    whole = learner_of(models[0], tokenizer, tmp_path / "whole")
    losses = [whole.update(each)["loss"] for each in groups]
    rare = learner_of(model_of(tokenizer), tokenizer, tmp_path / "rare", save_every=2)
    assert [rare.update(each)["loss"] for each in groups[:3]] == losses[:3] and rare.iteration == 3
    resumed = learner_of(models[1], tokenizer, tmp_path / "rare", save_every=2)
    assert resumed.iteration == 2
    assert [resumed.update(each)["loss"] for each in groups[2:]] == losses[2:]
    assert torch.equal(weights(models[1]), weights(models[0]))


def test_an_iteration_that_teaches_nothing_is_counted_with_the_others(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = model_of(tokenizer)
    learner = learner_of(model, tokenizer, tmp_path, save_every=3)
    uniform = [[trajectory(1.0, some(i)) for i in range(4)]]
    learner.update(uniform)
    learner.update(groups_of(model, 0))
    interrupted = learner_of(model_of(tokenizer), tokenizer, tmp_path)
    assert learner.iteration == 2 and interrupted.iteration == 1, "the first is saved, so that nothing is trained twice"
    learner.update(uniform)
    again = model_of(tokenizer)
    assert learner_of(again, tokenizer, tmp_path).iteration == 3 and torch.equal(weights(again), weights(model))


def test_an_error_of_the_trainer_reaches_the_caller_and_stays(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tokenizer)
    groups = groups_of(model, 0)
    learner = learner_of(model, tokenizer, tmp_path)
    learner.update(groups)

    def fail(rows: Any) -> Any:
        raise ArithmeticError("no batch today")

    monkeypatch.setattr(learner._trainer, "batch", fail)
    first = promptly(lambda: learner.update(groups))
    assert isinstance(first, ArithmeticError)
    monkeypatch.undo()
    second = promptly(lambda: learner.update(groups))
    assert isinstance(second, RuntimeError) and "no batch today" in str(second)
    assert "make a new GRPOLearner" in str(second)

    resumed = learner_of(model_of(tokenizer), tokenizer, tmp_path)
    assert resumed.iteration == 1
    assert promptly(lambda: resumed.update(groups)) is None


def test_a_lack_of_memory_names_the_cure(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(model_of(tokenizer), tokenizer, tmp_path, micro_batch_tokens=3)

    def fail(rows: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(learner._trainer, "batch", fail)
    error = promptly(lambda: learner.update(groups_of(learner.model, 0)))
    assert isinstance(error, torch.OutOfMemoryError) and "micro_batch_tokens=3" in error.__notes__[0]


def test_a_damaged_checkpoint_is_an_error_at_once(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    learner = learner_of(model, tokenizer, tmp_path)
    learner.update(groups_of(model, 0))
    whole = (tmp_path / "training.pt").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"no checkpoint"):
        (tmp_path / "training.pt").write_bytes(damaged)
        with pytest.raises(ConfigurationError, match="training.pt cannot be read .*delete it"):
            learner_of(model_of(tokenizer), tokenizer, tmp_path)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """What is written beyond so many bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("written", [1_000, 30_000])
def test_a_policy_that_the_disk_does_not_take_leaves_the_one_before(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, written: int
) -> None:
    """The error was `Error while serializing: I/O error`, and the draft kept its space."""
    model, folder = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=64), tmp_path / "trained"
    save_model(model, tokenizer, folder)
    before = policy_version(folder)
    with (
        largest_file(written),
        pytest.raises(ConfigurationError, match=f"{folder} cannot be written .*too large.*: free space"),
    ):
        save_model(model, tokenizer, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["trained"] and policy_version(folder) == before
    assert torch.equal(weights(LocalChatModel.from_path(folder).model), weights(model))
    save_model(model, tokenizer, folder)
    assert policy_version(folder) != before


@pytest.mark.parametrize("written", [1_000, 20_000])
def test_an_update_that_the_disk_does_not_take_is_repeated(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, written: int
) -> None:
    """`torch.save` called it `unexpected pos 3904 vs 3796`."""
    model = model_of(tokenizer)
    learner = learner_of(model, tokenizer, tmp_path)
    learner.update(groups_of(model, 0))
    groups = groups_of(model, 1)
    with largest_file(written):
        error = promptly(lambda: learner.update(groups))
    assert isinstance(error, ConfigurationError) and f"{tmp_path} cannot be written" in str(error)
    resumed = learner_of(model_of(tokenizer), tokenizer, tmp_path)
    assert resumed.iteration == 1
    assert promptly(lambda: resumed.update(groups)) is None


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.adapters import default_adapters
from dreamgym_lg.integrations.trl.learners import LEARNERS
from dreamgym_lg.types import Segment, Step, Task, Trajectory

def episode(i):
    step = Step(observation="o", action="a", next_observation="p", reward=float(i % 3 == 0))
    segment = Segment(token_ids=[7, 8, 9 + i, 11], sampled=[0, 0, 1, 1], logprobs=[0.0, 0.0, -5.0, -5.0], temperature=1.0)
    return Trajectory(task=Task(id="t", instruction="i", environment="e"), steps=[step], segments=[segment])

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # no buffer that a killed or forked process shares

def train(name, kill):
    policy = LocalChatModel.from_path(sys.argv[1])
    kind, _, lora = name.partition("+")
    options = {"peft_config": default_adapters()} if lora else {}
    learner = LEARNERS[kind](policy.model, policy.tokenizer, Path(sys.argv[1]) / name, **options)
    say(name, "begun", learner.iteration, learner._trainer.steps)
    if kill:
        os.write(told, b"x")
    while True:
        learner.update([[episode(i) for i in range(4)]])
        say(name, "done", learner.iteration)
        os.write(told, b"x")

rng = random.Random(0)
for name in sys.argv[2:]:
    for kill in range(2):  # the first after an update, the second at whatever moment
        begun, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                train(name, kill)
            finally:
                os._exit(1)
        os.close(told)
        os.read(begun, 1)
        time.sleep(rng.uniform(0.1, 1.0))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
"""


@pytest.mark.slow
def test_kills_at_any_moment_lose_no_counted_update(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Killed twice, each time going on in the same folder."""
    save_model(create_model(tokenizer, hidden_size=32, layers=1, max_tokens=64), tokenizer, tmp_path)
    names = {"grpo": GRPOLearner, "ppo+lora": PPOLearner, "dpo": DPOLearner}
    done = subprocess.run([sys.executable, "-c", KILLER, tmp_path, *names], capture_output=True, text=True, timeout=200)
    for name, kind in names.items():
        lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith(name)]
        assert [word for word, *_ in lines].count("begun") == 2, done.stdout + done.stderr[-2000:]
        count = 0
        for word, iteration, *step in lines:
            if word == "begun":
                assert count <= int(iteration) <= count + 1, "a count may not have been printed, but never is one lost"
                assert int(iteration) == int(step[0]), "the weights are those of the count"
            else:
                assert int(iteration) == count + 1
            count = int(iteration)
        assert count > 0
        policy = LocalChatModel.from_path(tmp_path)
        options: dict[str, Any] = {"peft_config": default_adapters()} if "lora" in name else {}
        resumed = kind(policy.model, policy.tokenizer, tmp_path / name, **options)
        assert count <= resumed.iteration <= count + 1
        assert promptly(partial(resumed.update, [[trajectory(float(i % 2), some(i + 5)) for i in range(4)]])) is None
