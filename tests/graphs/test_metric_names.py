"""The names under which trackers show a run: those of the documentation, with the right values at the right iteration."""

import re
from pathlib import Path
from typing import Any

import pytest

import dreamgym_lg.metrics
from dreamgym_lg.metrics import LIMITS, METRICS, RATES, ROLLOUTS, iteration_line, reported_metrics

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "metrics.md"


def test_the_documentation_lists_every_name_with_its_meaning() -> None:
    listed = re.findall(r"^\| `(\S+)` \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    dreamed, real = ({f"{place}/{name}" for name in ROLLOUTS} for place in ("dream", "real"))
    assert not (dreamed | real) & (METRICS.keys() | RATES.keys())
    assert set(listed) == dreamed | METRICS.keys() | RATES.keys() and len(listed) == len(set(listed))


def test_every_alarm_reaches_the_trackers() -> None:
    names = {name for name, *_ in LIMITS} | set(re.findall(r'Alarm\("(\w+)"', Path(dreamgym_lg.metrics.__file__).read_text()))
    assert len(names) > 7 and {f"alarm/{name}" for name in names} == {name for name in METRICS if name.startswith("alarm/")}


def test_each_iteration_is_reported_once_and_complete(process: Any, tmp_path: Path) -> None:
    seen = list[tuple[int, dict[str, float]]]()
    run = process(tmp_path, report=lambda iteration, metrics: seen.append((iteration, dict(metrics))))
    run.run(tmp_path)
    assert [iteration for iteration, _ in seen] == [0, 1, 2, 3]
    for (_, metrics), row in zip(seen, run.metrics(), strict=True):
        assert metrics["dream/success"] == row["train_success"] and metrics["policy/loss"] == row["loss"]
        assert metrics["seconds/update"] > 0


def test_a_name_says_where_the_episodes_were_played() -> None:
    row = {"train_success": 0.5, "real_steps": 7, "eval_real_successes": 3, "eval_real_episodes": 4, "kl": None, "x": "text"}
    shown = {"validation/real_success": 0.75, "real/steps_spent": 7}
    assert reported_metrics(row, "real") == {"real/success": 0.5, **shown}
    assert reported_metrics(row, "synthetic") == {"dream/success": 0.5, **shown}


@pytest.mark.parametrize("episodes", [0, None])
def test_a_share_of_nothing_is_not_shown(episodes: Any) -> None:
    assert reported_metrics({"eval_dream_successes": 0, "eval_dream_episodes": episodes}, "synthetic") == {}


def test_an_iteration_is_one_line() -> None:
    metrics = {"dream/success": 0.25, "dream/uniform_groups": 0.5, "seconds/rollout": 60.0, "seconds/update": 30.0}
    line = iteration_line(metrics, 0, 3)
    assert line == "iteration 1 of 3: dream success 0.25, 50% of the groups are uniform; 90 s, about 0:03:00 left"
    assert iteration_line({"real/success": 0.0, "seconds/rollout": 1.0}, 2, 3) == "iteration 3 of 3: real success 0.00; 1 s"
