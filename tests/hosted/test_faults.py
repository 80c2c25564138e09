"""Rollouts over a server of which 30 % of the calls fail at random: every episode is stored once, or its failure is, with its
cause; and what a spent budget stopped is played when there is more."""

from pathlib import Path
from typing import Any

import pytest
from chat_server import shares
from house import houses

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import BudgetExceeded
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import Trajectory

TASKS, GENERATIONS = 24, 2


async def play(policy: Any, model: Model, buffer: ReplayBuffer) -> list[Trajectory]:
    return await rollout(
        create_episode_graph(policy, max_steps=4).compile(),
        houses(TASKS),
        Dream([model]).create_environment,
        num_generations=GENERATIONS,
        source="synthetic",
        run="train",
        replay_buffer=buffer,
        experience_version=model.version,
    )


def check_stored_once(buffer: ReplayBuffer, played: list[Trajectory]) -> list[Trajectory]:
    stored = list(buffer.trajectories(run="train"))
    wanted = {(task.id, index) for task in houses(TASKS) for index in range(GENERATIONS)}
    assert {(each.task.id, each.rollout_index) for each in stored} == wanted and len(stored) == len(wanted) == len(played)
    assert {each.experience_version for each in stored} == {"door/experience-json-2"}
    return stored


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
async def test_with_enough_attempts_every_episode_comes_through(
    serve: Any, chat_model: Any, walker: Any, tmp_path: Path, seed: int
) -> None:
    server = serve(fault=shares(0.3, seed))
    chat = chat_model(server, max_retries=12, timeout=1.5)
    model = Model(chat, hosted=Hosted(tmp_path / "hosted.db"), retries=6)
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        stored = check_stored_once(buffer, await play(walker, model, buffer))
        assert all(each.error is None and each.success and len(each.steps) == 2 and each.reward == 1 for each in stored)
        assert len(server.requests) > 2 * TASKS + 5, "some calls did fail"
        before = len(server.requests)
        again = await play(walker, model, buffer)
        assert len(again) == len(stored) and len(server.requests) == before, "what is stored is not played again"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
async def test_without_retries_what_fails_is_recorded_with_its_cause(
    serve: Any, chat_model: Any, walker: Any, tmp_path: Path, seed: int
) -> None:
    server = serve(fault=shares(0.3, seed))
    model = Model(chat_model(server, timeout=1.5), retries=0)
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        stored = check_stored_once(buffer, await play(walker, model, buffer))
    failed = [each for each in stored if each.error is not None]
    assert 0 < len(failed) < len(stored)
    assert all(each.error.startswith(("ModelUnavailable: ", "PredictionFailed: ")) for each in failed if each.error)
    assert all(each.success and len(each.steps) == 2 for each in stored if each.error is None)
    assert not any(each.success for each in failed), "a failure is never a success, and what was played before it is kept"
    assert {len(each.steps) for each in failed} == {0, 1}


@pytest.mark.slow
async def test_a_spent_budget_stops_the_run_and_a_larger_one_goes_on(
    serve: Any, chat_model: Any, walker: Any, tmp_path: Path
) -> None:
    server = serve()
    chat, calls = chat_model(server), 2 * TASKS
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        hosted = Hosted(tmp_path / "hosted.db", max_calls=calls // 2, concurrency=4)
        with pytest.raises(BudgetExceeded, match=f"max_calls={calls // 2}"):
            await play(walker, Model(chat, hosted=hosted), buffer)
        assert all(each.error is None for each in buffer.trajectories()), "what was stopped is not recorded as failed"
        assert len(server.requests) == calls // 2
        hosted = Hosted(tmp_path / "hosted.db", max_calls=calls)
        stored = check_stored_once(buffer, await play(walker, Model(chat, hosted=hosted), buffer))
        assert all(each.success for each in stored)
        assert len(server.requests) == calls, "no answer was paid for twice"
