"""The closed loop end to end, small, killed once: what it leaves, and that it went on where it was."""

import json
from pathlib import Path

import pytest
import torch

from dreamgym_lg.experiment.evaluation import DREAMED
from dreamgym_lg.replay.buffer import ReplayBuffer

pytestmark = pytest.mark.slow
ITERATIONS, EPISODES, PROOF = 3, 6, 2


def test_demo_leaves_its_proof(finished_run: Path) -> None:
    result = json.loads((finished_run / "result.json").read_text())
    for policy in ("base", "filtered", "offline_rl", "trained"):
        for mode in ("greedy", "sampled"):
            dreamed = [result["dream"]] if mode == DREAMED and policy in ("base", "trained") else []
            for row in (result["real"], *dreamed):
                figures = row[policy][mode]
                assert 0 <= figures["successes"] <= figures["episodes"] and figures["episodes"] >= 1
                low, high = figures["interval"]
                assert low <= figures["successes"] / figures["episodes"] <= high
                assert row is result["dream"] or figures["failed"] == 0, "only an unreadable prediction may fail an episode"
        if policy in ("base", "trained"):
            assert set(result["dream"][policy]) == {DREAMED}, "dreamed episodes are dear: greedy ones are real alone"
    assert "filtered" not in result["dream"] and result["filtered"] > 0 and result["offline_rl"], "no dream had a part in it"
    assert result["real_steps"]["offline"] > 100
    stages = {"collect", "experience", "user", "base", "filtered", "offline_rl", "drawn", "train", "prove"}
    assert set(result["seconds"]) == stages and result["drawn"] == 0 and "drawn" not in result["real"]
    assert (finished_run / "report.html").stat().st_size > 10_000


def test_the_proof_is_on_worlds_nobody_trained_on(finished_run: Path) -> None:
    buffer = ReplayBuffer(finished_run / "replay.db")
    played = [t for t in buffer.trajectories(source="real") if t.run.startswith("proof/real/trained/greedy/")]
    proof = {t.task.observation for t in played}
    assert len(proof) == PROOF
    for run in ("offline", "train"):
        trained_on = {t.task.observation for t in buffer.trajectories(run=run)}
        assert trained_on and not trained_on & proof


def test_groups_are_whole_and_their_tokens_the_policys(finished_run: Path) -> None:
    buffer = ReplayBuffer(finished_run / "replay.db")
    for iteration in range(ITERATIONS):
        episodes = list(buffer.trajectories(run="train", iteration=iteration, segments=True))
        assert len(episodes) == EPISODES
        assert {episode.source for episode in episodes} == {"synthetic"}
        played = [episode for episode in episodes if episode.error is None]
        assert len(played) >= EPISODES / 2
        # an experience model of so few steps may answer nonsense: recorded with its cause, never silent
        assert all("PredictionFailed" in episode.error for episode in episodes if episode.error)
        for episode in played:
            assert len(episode.segments) == 1, "a conversation that only grows is one segment"
            # at most the 16 tokens of a reply for each step: the experience model's tokens are not among them
            assert 0 < episode.segments[0].trainable <= 16 * len(episode.steps)


def test_same_actions_same_world(finished_run: Path) -> None:
    """One world per group: rollouts that act alike see alike."""
    buffer = ReplayBuffer(finished_run / "replay.db")
    worlds: dict[tuple[str, int, tuple[str, ...]], tuple[str, float]] = {}
    compared = 0
    for episode in buffer.trajectories(run="train"):
        for end in range(1, len(episode.steps) + 1):
            key = (episode.task.id, episode.iteration, tuple(step.action for step in episode.steps[:end]))
            seen = (episode.steps[end - 1].next_observation, episode.steps[end - 1].reward)
            compared += key in worlds
            assert worlds.setdefault(key, seen) == seen
    assert compared > 5


def test_kill_9_loses_nothing_and_does_nothing_twice(finished_run: Path) -> None:
    killed = set(map(tuple, json.loads((finished_run.parent / "killed.json").read_text())))
    with ReplayBuffer(finished_run / "replay.db") as buffer:
        episodes = [(t.iteration, t.task.id, t.rollout_index) for t in buffer.trajectories(run="train")]
        metrics = buffer.metrics("train")
    assert len(episodes) == len(set(episodes)) == ITERATIONS * EPISODES
    assert set() < killed < set(episodes), "it came in the midst of training"
    state = torch.load(finished_run / "models" / "policy" / "training.pt", weights_only=True)
    updates = sum(not row["skipped"] for row in metrics)
    assert state["iteration"] == ITERATIONS
    assert updates
    assert {int(values["step"]) for values in state["optimizer"]["state"].values()} == {updates} == {state["steps"]}
