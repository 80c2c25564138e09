"""GRPO over TRL: the private seam still is what we take it for, updates learn, and a crash loses nothing."""

import asyncio
import inspect
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer

from dreamgym_lg.errors import ConfigurationError, NothingToTrain
from dreamgym_lg.integrations.transformers import LocalChatModel
from dreamgym_lg.integrations.transformers_scratch import create_model, create_tokenizer
from dreamgym_lg.integrations.trl.grpo import GRPOLearner, group_advantages, to_rows
from dreamgym_lg.integrations.trl.sft import save_model, tokenize, train_sft
from dreamgym_lg.policy import TokenRecorder
from dreamgym_lg.types import Segment, Step, Task, Trajectory

WORDS = ("red", "green", "blue", "yellow")
QUESTION = {"role": "user", "content": "say a colour"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tokenizer([*WORDS * 3, "say a colour", "a longer observation of the kitchen"], vocab_size=320)


def model_of(tokenizer: PreTrainedTokenizerFast) -> Any:
    return create_model(tokenizer, hidden_size=32, layers=1, max_tokens=128)


def learner_of(model: Any, tokenizer: PreTrainedTokenizerFast, path: Path, **options: Any) -> GRPOLearner:
    settings: dict[str, Any] = {"num_generations": 4, "learning_rate": 1e-2, "beta": 0.0, **options}
    return GRPOLearner(model, tokenizer, path, **settings)


@torch.no_grad()
def segment(model: Any, seed: int) -> Segment:
    """Random tokens as if `model` had sampled some of them: a prompt, a reply, an observation, a reply, an observation."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (5,), generator=generator).tolist()
    ids = torch.randint(5, 280, (sum(lengths),), generator=generator)
    sampled = [i % 2 for i, length in enumerate(lengths) for _ in range(length)]
    truth = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    logprobs = [0.0, *truth.tolist()]
    return Segment(
        token_ids=ids.tolist(), sampled=sampled, logprobs=[p * s for p, s in zip(logprobs, sampled, strict=True)]
    )


def trajectory(reward: float, *segments: Segment, task: str = "t", index: int = 0, error: str | None = None) -> Trajectory:
    step = Step(observation="o", action="a", next_observation="p", reward=reward)
    return Trajectory(
        task=Task(id=task, instruction="i", environment="e"),
        steps=(step,),
        source="synthetic",
        rollout_index=index,
        segments=segments,
        error=error,
    )


def groups_of(model: Any, seed: int, *, n: int = 2) -> list[list[Trajectory]]:
    return [
        [trajectory(float(i % 3 == g % 2), segment(model, 100 * seed + 10 * g + i), task=f"t{g}", index=i) for i in range(4)]
        for g in range(n)
    ]


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def moments(learner: GRPOLearner) -> torch.Tensor:
    """Adam's first moments."""
    states = learner._trainer.optimizer.state_dict()["state"]
    return torch.cat([states[key]["exp_avg"].flatten().clone() for key in sorted(states)])


def promptly(call: Callable[[], Any]) -> BaseException | None:
    """What `call` raised; fails instead of hanging."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert raised, "it hangs"
    return raised[0]


# --- the seam ---------------------------------------------------------------------------------------------------------


def test_trl_has_the_private_methods_with_the_parameters_we_use() -> None:
    assert list(inspect.signature(GRPOTrainer._generate_and_score_completions).parameters) == ["self", "inputs"]
    found = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert found[:6] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]
    assert list(inspect.signature(GRPOTrainer._compute_loss).parameters) == ["self", "model", "inputs"]


def plain_loss(model: Any, rows: Sequence[tuple[Segment, float]], *, beta: float = 0.0, clip: float = 0.2) -> torch.Tensor:
    """GRPO's clipped loss, written out: mean over rows of the mean over their sampled tokens."""
    losses = []
    for one, advantage in rows:
        ids, mask = torch.tensor([one.token_ids]), torch.tensor(one.sampled[1:]).bool()
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0][mask]
        ratio = (logprobs - torch.tensor(one.logprobs[1:])[mask]).exp()
        losses.append(-torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean())
    return torch.stack(losses).mean()


def test_the_loss_and_its_gradient_are_grpos_on_the_sampled_tokens_alone(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model, behaviour = model_of(tokenizer).eval(), create_model(tokenizer, hidden_size=32, layers=1, seed=1)
    rows = [(segment(behaviour, i), 0.5 * i - 0.6) for i in range(4)]
    learner = learner_of(model, tokenizer, tmp_path)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    loss = learner._trainer._compute_loss(model, learner._trainer._batch(rows))
    expected = plain_loss(model, rows)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert torch.allclose(gradient(loss), gradient(expected), atol=1e-5)


def test_environment_tokens_are_not_trained_on(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer).eval()
    learner = learner_of(model, tokenizer, tmp_path)
    rows = [(segment(model, i), 1.0 - 0.7 * i) for i in range(3)]
    batch = learner._trainer._batch(rows)
    loss = learner._trainer._compute_loss(model, batch)
    # probabilities that were never recorded have no say
    given = batch["tool_mask"] == 0
    assert given.any()
    batch["old_per_token_logps"] = batch["old_per_token_logps"].masked_fill(given, -3.0)
    assert learner._trainer._compute_loss(model, batch).item() == loss.item()
    # nor have the last observations, which no sampled token follows
    last = batch["tool_mask"].flip(1).cumsum(1).flip(1) == 0
    batch["completion_ids"] = batch["completion_ids"].masked_fill(last, 77)
    assert learner._trainer._compute_loss(model, batch).item() == pytest.approx(loss.item(), abs=1e-6)
    batch["completion_ids"] = batch["completion_ids"].masked_fill(batch["tool_mask"] == 1, 77)
    assert abs(learner._trainer._compute_loss(model, batch).item() - loss.item()) > 1e-3


def test_rows_that_fill_up_a_batch_add_nothing(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer).eval()
    learner = learner_of(model, tokenizer, tmp_path)
    real = segment(model, 0)
    filler = Segment(token_ids=real.token_ids, sampled=(), logprobs=())
    loss = learner._trainer._compute_loss(model, learner._trainer._batch([(real, 1.0), (filler, 0.0)]))
    assert loss.item() == pytest.approx(plain_loss(model, [(real, 1.0)]).item() / 2, abs=1e-6)


def test_the_reference_holds_the_policy_where_it_was(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_model(model_of(tokenizer), tokenizer, tmp_path / "base")
    moved = {}
    for beta in (0.0, 10.0):
        policy = LocalChatModel.from_path(tmp_path / "base")
        learner = learner_of(policy.model, tokenizer, tmp_path / str(beta), beta=beta, learning_rate=1e-3)
        before, groups = weights(policy.model), groups_of(policy.model, 0)
        for _ in range(4):
            metrics = learner.update(groups)
        learner.close()
        assert ("kl" in metrics) == (beta > 0)
        with torch.no_grad():
            moved[beta] = (weights(policy.model) - before).norm().item()
    assert moved[10.0] < moved[0.0]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_group_advantages_are_the_normalised_rewards() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([0.8658754, -0.8658754, -0.8658754, 0.8658754])
    rewards = torch.tensor([0.0, 0.25, 1.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert group_advantages(rewards.tolist()) == pytest.approx(expected.tolist())
    assert group_advantages([0.5, 0.5]) == [0.0, 0.0]
    assert group_advantages([0.5]) == [0.0]


def some(n: int) -> Segment:
    return Segment(token_ids=[1, n, n], sampled=[0, 1, 1], logprobs=[0.0, -1.0, -1.0])


def test_uniform_groups_give_no_rows() -> None:
    uniform = [trajectory(1.0, some(i)) for i in range(3)]
    assert to_rows([uniform, uniform]) == []
    assert len(to_rows([uniform, [trajectory(float(i), some(i)) for i in range(3)]])) == 3


def test_failed_rollouts_are_left_out_of_the_group() -> None:
    failed = trajectory(9.0, some(9), error="PredictionFailed: unreadable")
    rows = to_rows([[trajectory(0.0, some(0)), failed, trajectory(1.0, some(1))]])
    assert [one.token_ids[1] for one, _ in rows] == [0, 1]
    assert [advantage for _, advantage in rows] == pytest.approx(group_advantages([0.0, 1.0]))
    assert to_rows([[failed, trajectory(0.0, some(0)), trajectory(0.0, some(0))]]) == []
    assert to_rows([[trajectory(0.0, some(0)), trajectory(1.0)]]) == [], "an episode without tokens cannot be compared"


def test_an_episode_of_several_segments_weighs_as_one() -> None:
    rows = to_rows([[trajectory(0.0, some(0)), trajectory(1.0, some(1), some(2), some(3))]])
    low, high = group_advantages([0.0, 1.0])
    assert [advantage for _, advantage in rows] == pytest.approx([low, high / 3, high / 3, high / 3])


# --- updates ----------------------------------------------------------------------------------------------------------


async def answers(policy: LocalChatModel, n: int, *, seed: int) -> list[Trajectory]:
    async def episode(index: int) -> Trajectory:
        with TokenRecorder(seed=1000 * seed + index) as recorder:
            reply = await policy.ainvoke([(QUESTION["role"], QUESTION["content"])])
        return trajectory(float(reply.text == "blue"), *recorder.segments(), task=f"t{index // 8}", index=index % 8)

    return list(await asyncio.gather(*(episode(index) for index in range(n))))


def test_a_bandit_learns_the_rewarded_word(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    shown = [[QUESTION, {"role": "assistant", "content": word}] for word in WORDS]
    train_sft(model, tokenizer, tokenize(tokenizer, shown), steps=40, learning_rate=1e-2)
    policy = LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=4)
    learner = learner_of(model, tokenizer, tmp_path, num_generations=8, learning_rate=3e-3)
    shares, metrics = [], {}
    for update in range(25):
        played = asyncio.run(answers(policy, 32, seed=update))
        shares.append(sum(one.reward for one in played) / 32)
        metrics = learner.update([played[i : i + 8] for i in range(0, 32, 8)]) or metrics
        policy.weights_changed()
    learner.close()
    assert learner.iteration == 25
    assert 0.1 < sum(shares[:2]) / 2 < 0.45, shares
    assert sum(shares[-3:]) / 3 > 0.9, shares
    assert metrics["trainable_tokens"] > 0


def test_metrics_and_the_mean_over_optimiser_steps(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    groups = groups_of(model, 0)
    learner = learner_of(model, tokenizer, tmp_path, updates=2)
    metrics = learner.update(groups)
    learner.close()
    assert metrics["trainable_tokens"] == sum(one.trainable for group in groups for t in group for one in t.segments)
    assert metrics["skipped"] == 0
    assert {"loss", "grad_norm", "entropy"} <= set(metrics)
    assert learner._trainer.state.global_step == 2


@pytest.mark.parametrize("error", ["PredictionFailed: unreadable", None])
def test_nothing_to_train_names_the_causes(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, error: str | None
) -> None:
    learner = learner_of(model_of(tokenizer), tokenizer, tmp_path)
    episodes = [trajectory(float(i), error=error) for i in range(4)]
    with pytest.raises(NothingToTrain, match="4 episodes gave 0 trainable tokens.*" + (error or "a LocalChatModel")):
        learner.update([episodes])
    assert learner.iteration == 0


def test_a_group_needs_two_episodes(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="num_generations=1"):
        learner_of(model_of(tokenizer), tokenizer, tmp_path, num_generations=1)


def test_uniform_groups_leave_the_weights_as_they_are(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    uniform = [[trajectory(1.0, segment(model, i)) for i in range(4)]]
    learner = learner_of(model, tokenizer, tmp_path)
    before = weights(model)
    assert learner.update(uniform)["skipped"] == 1
    assert torch.equal(weights(model), before)
    assert learner.update(groups_of(model, 0))["skipped"] == 0
    assert not torch.equal(weights(model), before)
    assert learner.update(uniform)["skipped"] == 1
    learner.close()
    assert learner_of(model_of(tokenizer), tokenizer, tmp_path).iteration == 3


class EngineRunsMeanwhile(queue.SimpleQueue[Any]):
    def __init__(self, model: Any) -> None:
        self.model = model

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        rows = super().get()
        self.model.eval()
        return rows


def test_a_policy_left_in_evaluation_mode_is_trained_alike(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The engine answers in evaluation mode, where TRL would scale the loss in another way."""
    found = []
    for evaluating in (False, True):
        model = model_of(tokenizer)
        learner = learner_of(model, tokenizer, tmp_path / str(evaluating))
        learner._trainer.feed = EngineRunsMeanwhile(model) if evaluating else learner._trainer.feed
        metrics = learner.update(groups_of(model_of(tokenizer), 1))
        found.append((metrics["loss"], metrics["grad_norm"]))
        learner.close()
    assert found[0] == pytest.approx(found[1])


# --- crashes ----------------------------------------------------------------------------------------------------------


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
    learner.close()

    again = model_of(tokenizer)
    assert torch.equal(weights(again), start)
    resumed = learner_of(again, tokenizer, tmp_path / "copy")
    assert resumed.iteration == 2
    assert torch.equal(weights(again), middle)
    assert torch.equal(moments(resumed), adam)
    resumed.update(groups[2])
    resumed.close()
    assert resumed.iteration == 3
    assert (weights(again) - weights(model)).abs().max() < 1e-5
    assert (moments(resumed) - moments(learner)).abs().max() < 1e-5


def test_an_update_that_was_saved_but_not_counted_is_repeated(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    groups = [groups_of(model, i) for i in range(2)]
    learner = learner_of(model, tokenizer, tmp_path)
    learner.update(groups[0])
    counted = (tmp_path / "progress.json").read_text()
    learner.update(groups[1])
    learner.close()
    (tmp_path / "progress.json").write_text(counted)  # the crash came between checkpoint and count
    again = model_of(tokenizer)
    resumed = learner_of(again, tokenizer, tmp_path)
    assert resumed.iteration == 1
    resumed.update(groups[1])
    resumed.close()
    assert (weights(again) - weights(model)).abs().max() < 1e-5


def test_an_error_of_the_trainer_reaches_the_caller_and_stays(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tokenizer)
    groups = groups_of(model, 0)
    learner = learner_of(model, tokenizer, tmp_path)
    learner.update(groups)

    def fail(rows: Any) -> Any:
        raise ArithmeticError("no batch today")

    monkeypatch.setattr(learner._trainer, "_batch", fail)
    first = promptly(lambda: learner.update(groups))
    assert isinstance(first, ArithmeticError)
    monkeypatch.undo()
    second = promptly(lambda: learner.update(groups))
    assert isinstance(second, RuntimeError) and "no batch today" in str(second)
    assert "make a new GRPOLearner" in str(second)
    assert promptly(learner.close) is None
    assert isinstance(promptly(lambda: learner.update(groups)), RuntimeError)

    resumed = learner_of(model_of(tokenizer), tokenizer, tmp_path)
    assert resumed.iteration == 1
    assert promptly(lambda: resumed.update(groups)) is None
    resumed.close()


def test_a_trainer_that_ended_by_itself_does_not_hang_the_caller(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of(model_of(tokenizer), tokenizer, tmp_path)
    monkeypatch.setattr(learner._trainer, "train", lambda **_: None)
    for _ in range(2):
        error = promptly(lambda: learner.update(groups_of(learner.model, 0)))
        assert isinstance(error, RuntimeError) and "ended by itself" in str(error)


def test_a_damaged_checkpoint_is_an_error_at_once(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    learner = learner_of(model, tokenizer, tmp_path)
    learner.update(groups_of(model, 0))
    learner.close()
    shutil.rmtree(tmp_path / "checkpoint-1")
    error = promptly(lambda: learner_of(model_of(tokenizer), tokenizer, tmp_path))
    assert error is not None and "checkpoint-1" in str(error)


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from dreamgym_lg.integrations.transformers_scratch import create_model, create_tokenizer
from dreamgym_lg.integrations.trl.grpo import GRPOLearner
from dreamgym_lg.types import Segment, Step, Task, Trajectory

def episode(i):
    step = Step(observation="o", action="a", next_observation="p", reward=float(i % 3 == 0))
    segment = Segment(token_ids=[7, 8, 9 + i, 11], sampled=[0, 0, 1, 1], logprobs=[0.0, 0.0, -5.0, -5.0])
    return Trajectory(task=Task(id="t", instruction="i", environment="e"), steps=[step], segments=[segment])

def train(kill):
    tokenizer = create_tokenizer(["a few words"])
    model = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=64)
    learner = GRPOLearner(model, tokenizer, sys.argv[1], num_generations=4, beta=0.0)
    print("begun", learner.iteration, learner._trainer.state.global_step, flush=True)
    if kill != 1:
        os.write(told, b"x")
    while True:
        learner.update([[episode(i) for i in range(4)]])
        print("done", learner.iteration, flush=True)
        os.write(told, b"x")

rng = random.Random(int(sys.argv[2]))
for kill in range(3):
    begun, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            train(kill)
        finally:
            os._exit(1)
    os.close(told)
    os.read(begun, 1)
    time.sleep(rng.uniform(0.1, 1.0))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


def test_kills_at_any_moment_lose_no_counted_update(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Killed three times, each time going on in the same folder."""
    done = subprocess.run([sys.executable, "-c", KILLER, tmp_path, "0"], capture_output=True, text=True, timeout=100)
    lines = [line.split() for line in done.stdout.splitlines()]
    begun = [index for index, line in enumerate(lines) if line[0] == "begun"]
    assert len(begun) == 3, done.stderr[-2000:]
    count = 0
    for word, iteration, *step in lines:
        if word == "begun":
            assert count <= int(iteration) <= count + 1, "a count may not have been printed, but never is one lost"
            assert int(iteration) == int(step[0]), "the weights are those of the count"
        else:
            assert int(iteration) == count + 1
        count = int(iteration)
    assert count > 0
    model = create_model(create_tokenizer(["a few words"]), hidden_size=32, layers=1, max_tokens=64)
    resumed = GRPOLearner(model, tokenizer, tmp_path, num_generations=4, beta=0.0)
    assert count <= resumed.iteration <= count + 1
    assert promptly(lambda: resumed.update([[trajectory(float(i % 2), some(i + 5)) for i in range(4)]])) is None
    resumed.close()
