"""The change test: it finds a planted loss, claims nothing without one, and plays both versions in the same worlds."""

import sys
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from dreamgym_lg import ReplayBuffer, load_traces
from dreamgym_lg.cli.app import app
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.comparison import Comparison, Version, play_version
from dreamgym_lg.simulate.wall.wall import missing_for_wall
from dreamgym_lg.statistics import Rate, mean_interval

DESK = Path(__file__).parents[2] / "cookbook" / "support_desk"


def version(rates: list[float], rng: Random, episodes: int = 4) -> Version:
    rewards = tuple(sum(rng.random() < rate for _ in range(episodes)) / episodes for rate in rates)
    return Version(name="v", success=Rate.of(1, 2), rewards=rewards, actions=1, seconds=1, tokens=0)


def claims(loss: float, *, tasks: int, runs: int) -> int:
    """How many of so many simulated comparisons claim a difference; each task has its own difficulty."""
    rng, number = Random(f"{loss}/{tasks}"), 0
    for _ in range(runs):
        rates = [rng.betavariate(1.5, 1) for _ in range(tasks)]
        worse = [max(0.0, rate - loss) for rate in rates]
        number += Comparison(before=version(rates, rng), after=version(worse, rng)).differs
    return number


@pytest.mark.parametrize("tasks", [12, 40, 200])
def test_an_agent_does_not_differ_from_itself(tasks: int) -> None:
    assert claims(0.0, tasks=tasks, runs=1000) <= 50


def test_ten_points_are_found_with_200_tasks() -> None:
    assert claims(0.1, tasks=200, runs=200) >= 160


def test_a_difference_has_its_sign() -> None:
    rng, rates = Random(0), [0.9] * 50
    better = Comparison(before=version([0.1] * 50, rng), after=version(rates, rng))
    assert better.interval[0] > 0
    assert str(better).startswith("better: +0.")
    assert str(Comparison(before=better.after, after=better.before)).startswith("worse: -0.")


def test_few_tasks_prove_nothing() -> None:
    assert mean_interval([1.0] * 9) == (-1.0, 1.0)
    low, high = mean_interval([0.0, 1.0] * 50)
    assert 0.4 < low < 0.5 < high < 0.6


async def test_no_task_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="import traces first"):
        await play_version("v", None, [], None, num_generations=1)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason="a compiled world needs the wall")
def test_a_version_that_looks_nothing_up_is_worse(tmp_path: Path) -> None:
    pytest.importorskip("langchain", reason="needs langchain")
    sys.path.insert(0, str(DESK))
    try:
        from old_policy import WRITES, write_traces
        from tickets import Shop, create_shop
    finally:
        sys.path.remove(str(DESK))
    tasks = create_shop(tmp_path / "shop.db", seed=1, train=96, validation=0, test=0)
    write_traces(tmp_path / "traces.jsonl", Shop(tmp_path / "shop.db"), tasks, seed=1)
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        buffer.extend(load_traces(tmp_path / "traces.jsonl"))
        compile_world(buffer, tmp_path / "world", writes=WRITES)
    (tmp_path / "agents.py").write_text(
        f"import sys\nsys.path.insert(0, {str(DESK)!r})\nfrom agent import create_desk\nfrom old_policy import OldPolicy\n"
        "good = create_desk(OldPolicy(habit='good'))\nhasty = create_desk(OldPolicy(habit='answers_at_once'))\n"
    )
    arguments = ["--replay-buffer", str(tmp_path / "replay.db"), "--world", str(tmp_path / "world"), "--episodes", "1"]
    arguments += [each for tool in WRITES for each in ("--writes", tool)]

    def run(first: str, second: str) -> tuple[int, str]:
        names = [f"{tmp_path / 'agents.py'}:{name}" for name in (first, second)]
        result = CliRunner().invoke(app, ["compare", *names, *arguments, "--fail-below", "0"])
        return result.exit_code, " ".join(result.output.split())

    code, output = run("good", "hasty")
    assert code == 1, output
    assert "worse: -0." in output
    code, output = run("good", "good")
    assert code == 0, output
    assert "no difference is shown: +0.000" in output
