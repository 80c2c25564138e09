"""What a training tells of a hosted experience model's cost: an estimate after the first episodes, and totals."""

from pathlib import Path
from typing import Any

import pytest
from house import houses

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.graphs.training import Training, run_training
from dreamgym_lg.hosted import Hosted, Usage
from dreamgym_lg.metrics import estimate_rest
from dreamgym_lg.replay.buffer import ReplayBuffer


class Learner:
    """Trains nothing."""

    iteration, metrics = 0, {"skipped": 0.0}

    def update(self, groups: Any) -> dict[str, float]:
        self.iteration += 1
        return self.metrics


def test_after_the_first_episodes_the_rest_is_estimated_and_each_iteration_has_the_total(
    serve: Any, chat_model: Any, walker: Any, tmp_path: Path
) -> None:
    hosted, told = Hosted(prices=(1000.0, 5000.0), max_calls=30), list[str]()
    dream = Dream([Model(chat_model(serve()), hosted=hosted)])
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        training = Training(
            policy=walker,
            learner=Learner(),
            source="synthetic",
            dream=dream,
            num_tasks=3,
            num_generations=1,
            replay_buffer=buffer,
            create_environment=dream.create_environment,
            curriculum=Curriculum(houses(30), seed=3),
            evaluate=lambda finished: {},
            evaluate_every=2,
            evaluated=5,
            stop_after_uniform=0,
            say=told.append,
        )
        run_training(training, tmp_path / "training.db", run="train", iterations=4)
        rows = buffer.metrics("train")
    first = rows[0]
    calls = first["hosted_calls"]
    assert first["hosted_total_cost"] == first["hosted_cost"] == pytest.approx(calls * (100 * 1000 + 20 * 5000) / 1e6)
    assert rows[-1]["hosted_total_calls"] == hosted.usage.calls == sum(row["hosted_calls"] for row in rows)
    assert rows[-1]["hosted_total_tokens"] == 120 * hosted.usage.calls
    (text,) = [each for each in told if "hosted" in each]
    left = 3 * 3 + 2 * 5  # three iterations, and two evaluations
    about = f"will take about {calls * left / 3:,.0f} calls and {120 * calls * left / 3:,.0f} tokens"
    assert f"3 episodes took {calls} calls" in text and f"the {left} that are left" in text and about in text
    assert f"cost {first['hosted_cost'] * left / 3:,.2f}" in text


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({}, "what that costs is told with Hosted(prices=(input, output))"),
        ({"prices": (1.0, 1.0)}, "cost 0.0096"),
        ({"max_calls": 89}, "The run will reach max_calls=89 before its end"),
        ({"max_calls": 90, "max_tokens": 9999}, "The run will reach max_tokens=9999 before its end"),
    ],
)
def test_a_budget_that_will_not_do_is_told_beforehand(limits: dict[str, Any], told: str) -> None:
    hosted, spent = Hosted(**limits), Usage(calls=10, input_tokens=1000, output_tokens=200, cost=0.00125)
    hosted._store.spend(spent)
    assert told in (text := estimate_rest(hosted, spent, played=2, left=16))
    assert "will take about 80 calls and 9,600 tokens" in text and text.count("will reach") == ("The run" in told)
