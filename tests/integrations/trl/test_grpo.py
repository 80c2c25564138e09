"""GRPO: its loss, what it learns, and what it measures."""

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_parts import (
    QUESTION,
    WORDS,
    gradient,
    groups_of,
    learner_of,
    model_of,
    row,
    segment,
    trajectory,
    weights,
)
from tiny_models import create_model
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.errors import NothingToTrain
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.learners import LEARNERS
from dreamgym_lg.integrations.trl.rows import tokenize
from dreamgym_lg.integrations.trl.sft import save_model, train_sft
from dreamgym_lg.learner import LearnerName, TrainingRow, observed_tokens
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Segment, Trajectory

# --- the loss -------------------------------------------------------------------------------------------------------


def plain_loss(model: Any, rows: Sequence[TrainingRow], *, clip: float = 0.2) -> torch.Tensor:
    """GRPO's clipped loss, written out: mean over episodes of the mean over their sampled tokens."""
    losses = []
    for one, (advantage, *_), *_ in rows:
        ids, mask = torch.tensor([one.token_ids]), torch.tensor(one.sampled[1:]).bool()
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0][mask]
        ratio = (logprobs - torch.tensor(one.logprobs[1:])[mask]).exp()
        losses.append(-torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean())
    return torch.stack(losses).mean()


def test_the_loss_and_its_gradient_are_grpos_on_the_sampled_tokens_alone(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model, behaviour = model_of(tokenizer).eval(), create_model(tokenizer, hidden_size=32, layers=1, seed=1)
    rows = [row(segment(behaviour, i), 0.5 * i - 0.6, 4) for i in range(4)]
    learner = learner_of(model, tokenizer, tmp_path)

    def slope(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    loss, _ = learner._trainer.loss(learner._trainer.batch(rows))
    expected = plain_loss(model, rows)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert torch.allclose(slope(loss), slope(expected), atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 1000])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_echo_is_the_mean_cross_entropy_of_observations_in_the_same_pass(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, moved: Any, tokens: int, beta: float
) -> None:
    """Equal to a plain reference, on random tokens; nothing changes where it is off."""
    group = groups_of(moved, 3, n=1)[0]
    played = []
    for number, each in enumerate(group):
        (one,), (step,) = each.segments, each.steps
        texts = [tokenizer.decode(one.token_ids[begin:end]) for begin, end in _gaps(one.sampled)]
        steps = [replace(step, next_observation=texts[0], decided_by="recorded")]
        steps += [replace(step, reward=0.0, next_observation=texts[1], decided_by="model" if number % 2 else "compiled")]
        played.append(replace(each, steps=steps))
    found = {
        echo: gradient(moved, tokenizer, tmp_path / f"{echo}", [played], beta=beta, micro_batch_tokens=tokens, **options)
        for echo, options in ((0.0, {}), (-1.0, {"echo": 0.0}), (0.05, {"echo": 0.05}))
    }
    assert torch.equal(found[0.0], found[-1.0]), "zero when it is off"
    losses = []
    for each in played:
        (one,), (marks,) = each.segments, observed_tokens(each, tokenizer.decode)
        for (begin, end), step in zip(_gaps(one.sampled), each.steps, strict=True):
            assert any(marks[begin:end]) == (step.decided_by != "model")
        truth = torch.log_softmax(moved(torch.tensor([one.token_ids])).logits[0, :-1], dim=-1)
        nats = -truth.gather(1, torch.tensor(one.token_ids[1:])[:, None])[:, 0]
        losses.append(nats[torch.tensor(marks[1:])])
    expected = torch.autograd.grad(0.05 * torch.cat(losses).mean(), list(moved.parameters()))
    echo = found[0.05] - found[0.0]
    assert torch.allclose(echo, torch.cat([each.flatten() for each in expected]), atol=2e-5) and echo.norm() > 1e-3


def _gaps(sampled: Sequence[int]) -> list[tuple[int, int]]:
    """Where what is read behind a reply begins and ends."""
    edges = [i for i in range(1, len(sampled)) if sampled[i] != sampled[i - 1]]
    return [(i, end) for i, end in zip(edges, [*edges[1:], len(sampled)], strict=True) if not sampled[i]]


def test_a_step_is_as_long_as_the_share_of_groups_that_differ(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """AdamW takes a step from one group of twelve as far as one from all."""
    moves = {}
    for uniform in (0, 11):
        model = model_of(tokenizer)
        alike = [[trajectory(1.0, segment(model, i)) for i in range(4)]] * uniform
        learner, before = learner_of(model, tokenizer, tmp_path / str(uniform)), weights(model)
        assert learner.update([*groups_of(model, 0, n=1), *alike])["learning_rate"] == pytest.approx(1e-2 / (1 + uniform))
        moves[uniform] = weights(model) - before
    assert torch.allclose(moves[11], moves[0] / 12, atol=1e-6) and moves[0].abs().max() > 5e-3


def test_environment_tokens_are_not_trained_on(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer).eval()
    learner = learner_of(model, tokenizer, tmp_path)
    rows = [row(segment(model, i), 1.0 - 0.7 * i, 3) for i in range(3)]
    loss = learner._trainer.loss(learner._trainer.batch(rows))[0].item()

    def changed(place: int, **values: Any) -> float:
        """The loss with another token, or another recorded probability, at a place of each row."""
        others = []
        for each in rows:
            fields = {name: list(getattr(each.segment, name)) for name in values}
            for name, value in values.items():
                fields[name][place] = value
            others.append(each._replace(segment=replace(each.segment, **fields)))
        return float(learner._trainer.loss(learner._trainer.batch(others))[0].item())

    assert all(not each.segment.sampled[0] and not each.segment.sampled[-1] for each in rows)
    assert changed(0, logprobs=-3.0) == loss, "probabilities that were never recorded have no say"
    assert changed(-1, token_ids=77) == pytest.approx(loss, abs=1e-6), "nor has the last observation"
    sampled = [row._replace(segment=replace(row.segment, token_ids=_other(row.segment))) for row in rows]
    assert abs(learner._trainer.loss(learner._trainer.batch(sampled))[0].item() - loss) > 1e-3


def _other(one: Segment) -> list[int]:
    """Another token in the place of each sampled one."""
    return [77 if own else token for token, own in zip(one.token_ids, one.sampled, strict=True)]


def test_the_reference_holds_the_policy_where_it_was(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_model(model_of(tokenizer), tokenizer, tmp_path / "base")
    moved = {}
    for beta in (0.0, 10.0):
        policy = LocalChatModel.from_path(tmp_path / "base")
        learner = learner_of(policy.model, tokenizer, tmp_path / str(beta), beta=beta, learning_rate=1e-3)
        before, groups = weights(policy.model), groups_of(policy.model, 0)
        for _ in range(4):
            metrics = learner.update(groups)
        assert ("kl" in metrics) == (beta > 0)
        with torch.no_grad():
            moved[beta] = (weights(policy.model) - before).norm().item()
    assert moved[10.0] < moved[0.0]


# --- updates ----------------------------------------------------------------------------------------------------------


async def answers(policy: LocalChatModel, n: int, *, seed: int) -> list[Trajectory]:
    async def episode(index: int) -> Trajectory:
        with TokenRecorder(seed=1000 * seed + index) as recorder:
            reply = await policy.ainvoke([(QUESTION["role"], QUESTION["content"])])
        return trajectory(float(reply.text == "blue"), *recorder.segments(), task=f"t{index // 8}", index=index % 8)

    return list(await asyncio.gather(*(episode(index) for index in range(n))))


@pytest.fixture(scope="module")
def bandit(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that says each of the words."""
    model, folder = model_of(tokenizer), tmp_path_factory.mktemp("bandit")
    shown = [[QUESTION, {"role": "assistant", "content": word}] for word in WORDS]
    train_sft(model, tokenize(tokenizer, shown), steps=40, learning_rate=1e-2)
    save_model(model, tokenizer, folder)
    return folder


@pytest.mark.parametrize("name", ["grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in LEARNERS if name != "grpo")])
def test_a_bandit_learns_the_rewarded_word(
    tokenizer: PreTrainedTokenizerFast, bandit: Path, tmp_path: Path, name: LearnerName
) -> None:
    policy = LocalChatModel.from_path(bandit, max_new_tokens=4)
    beta = 0.1 if name == "dpo" else 0.0
    learner = learner_of(policy.model, tokenizer, tmp_path / "run", LEARNERS[name], learning_rate=3e-3, beta=beta)
    shares, metrics = [], {}
    for update in range(25):
        played = asyncio.run(answers(policy, 32, seed=update))
        shares.append(sum(one.reward for one in played) / 32)
        metrics = learner.update([played[i : i + 8] for i in range(0, 32, 8)]) or metrics
        policy.weights_changed()
    assert learner.iteration == 25
    assert 0.1 < sum(shares[:2]) / 2 < 0.45, shares
    assert sum(shares[-3:]) / 3 > 0.9, shares
    assert metrics["trainable_tokens"] > 0


def test_metrics_and_the_mean_over_optimiser_steps(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = model_of(tokenizer)
    groups = groups_of(model, 0)
    learner = learner_of(model, tokenizer, tmp_path, updates=2)
    metrics = learner.update(groups)
    assert metrics["trainable_tokens"] == sum(one.trainable for group in groups for t in group for one in t.segments)
    assert metrics["skipped"] == 0
    assert {"loss", "grad_norm", "entropy"} <= set(metrics)
    assert learner._trainer.steps == 2


@pytest.mark.parametrize("error", ["PredictionFailed: unreadable", None])
def test_nothing_to_train_names_the_causes(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, error: str | None) -> None:
    learner = learner_of(model_of(tokenizer), tokenizer, tmp_path)
    episodes = [trajectory(float(i), error=error) for i in range(4)]
    with pytest.raises(NothingToTrain, match="4 episodes gave 0 trainable tokens.*" + (error or "a LocalChatModel")):
        learner.update([episodes])
    assert learner.iteration == 0


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
    assert learner_of(model_of(tokenizer), tokenizer, tmp_path).iteration == 3


def test_a_policy_left_in_evaluation_mode_is_trained_alike(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The engine answers in evaluation mode."""
    found, start = [], model_of(tokenizer)
    for evaluating in (False, True):
        model = deepcopy(start)  # two models of one seed differ if another thread draws from torch's generator meanwhile
        learner = learner_of(model, tokenizer, tmp_path / str(evaluating))
        model.train(not evaluating)
        metrics = learner.update(groups_of(start, 1))
        found.append((metrics["loss"], metrics["grad_norm"]))
    assert found[0] == pytest.approx(found[1])
