"""cookbook/reproduce: which cells there are, one from nothing, and the statistics of its tables."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.statistics import wilson

pytest.importorskip("trl")
pytest.importorskip("textworld_express")

FOLDER = Path(__file__).parent.parent / "cookbook" / "reproduce"


@pytest.fixture(scope="module")
def reproduce() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    try:
        import run
        import tables

        yield SimpleNamespace(run=run, tables=tables)
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("run", "tables"):
            sys.modules.pop(name)


def test_cells_by_pattern(reproduce: Any) -> None:
    matching = reproduce.run.matching
    cells = [str(cell) for cell in matching(["twc", "desk"], [0, 1], [])]
    assert cells[:5] == [
        "twc.grpo.dream.seed0", "twc.grpo.s2r.seed0", "twc.grpo.dream+real.seed0", "twc.grpo.real.seed0",
        "desk.rft.dream.seed0",
    ] and len(cells) == 2 * (4 + 8)  # fmt: skip
    assert [str(cell) for cell in matching(["twc", "desk"], [1], ["desk.rft.*", "twc.grpo.real.seed1"])] == [
        "twc.grpo.real.seed1", "desk.rft.dream.seed1", "desk.rft.model.seed1", "desk.rft.s2r.seed1", "desk.rft.real.seed1",
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="--only 'dream' fits none"):
        matching(["twc"], [0], ["dream"])


def test_cells_of_a_seed_differ_in_where_they_train(reproduce: Any, tmp_path: Path) -> None:
    cells = reproduce.run.matching(["twc"], [3], [])
    settings = {str(cell): reproduce.run.open_experiment(cell, tmp_path / str(cell), {}).settings for cell in cells}
    assert {(s.seed, s.max_gap, s.max_false_success) for s in settings.values()} == {(3, None, None)}
    places = {"dream": None, "s2r": 800, "dream+real": 800, "real": None}
    assert {s.environment: s.real_steps for s in settings.values()} == places


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"), [(0, 0, 1.0), (5, 5, 1.0), (10, 2, 158 / 4096), (0, 6, 2 / 64), (6, 0, 2 / 64)]
)
def test_mcnemar(reproduce: Any, only_a: int, only_b: int, p: float) -> None:
    assert reproduce.tables.mcnemar(only_a, only_b) == pytest.approx(p)


def test_the_interval_over_seeds(reproduce: Any) -> None:
    over_seeds, half = reproduce.tables.over_seeds, [1, 0] * 50
    assert over_seeds([[1] * 10, [0] * 10]) == (0.5, 0, 1), "two seeds that disagree say nothing"
    alike = over_seeds([half] * 30)  # only the tasks vary: sqrt(0.25 / 100 / 30) = 0.0091
    assert alike.value == 0.5 and (alike.high - alike.low) / 2 == pytest.approx(1.96 * 0.0091, rel=0.1)
    apart = over_seeds([[1] * 9 + [0]] * 15 + [[0] * 9 + [1]] * 15)  # seeds too: sqrt((0.16 + 0.09 / 10) / 30) = 0.0751
    assert apart.value == 0.5 and (apart.high - apart.low) / 2 == pytest.approx(1.96 * 0.0751, rel=0.1)
    assert over_seeds([[1, 0, 0, -1]])[:1] == (0,) and over_seeds([[1] * 6])[0] == 1


def tasks(outcomes: str) -> dict[str, bool]:
    return {f"task {number}": outcome == "1" for number, outcome in enumerate(outcomes)}


def test_a_share_of_one_seed_or_without_a_difference_has_wilsons_interval(reproduce: Any) -> None:
    success_of = reproduce.tables.success_of
    assert success_of({3: tasks("1110000000")}) == pytest.approx((0.3, *wilson(3, 10)))
    assert success_of({3: tasks("0" * 10), 4: tasks("0" * 10)}) == pytest.approx((0, *wilson(0, 20)))
    assert success_of({3: tasks("1" * 10), 4: tasks("0" * 10)}) == (0.5, 0, 1)


def test_pairs_are_of_the_same_tasks_and_seeds(reproduce: Any) -> None:
    compare = reproduce.tables.compare
    first = {0: tasks("1110"), 1: tasks("1100"), 2: tasks("1111")}
    difference, by_seed = compare(first, {0: tasks("1001"), 1: tasks("0000"), 5: tasks("1111")})
    assert difference.value == pytest.approx((0.25 + 0.5) / 2) and by_seed == [(2, 1), (2, 0)]
    assert compare(first, first)[0] == (0, 0, 0)
    assert compare(first, {7: tasks("1001")}) is None and compare(first, {0: {"another": True}}) is None


def cell(place: str, seed: int, trained: str, assisted: bool = False, **baselines: str) -> dict[str, Any]:
    real = {name: {"sampled": {"outcomes": tasks(outcomes)}} for name, outcomes in {**baselines, "trained": trained}.items()}
    steps = {"offline": 9000, "train": 0 if place == "dream" else 800, "evaluation": 99}
    return {
        "world": "twc", "learner": "grpo", "place": place, "seed": seed, "assisted": assisted, "real": real,
        "real_steps": steps, "seconds": {"train": 120},
    }  # fmt: skip


def test_the_table_has_the_rows_of_a_proof_and_claims_against_the_best_without_a_dream(reproduce: Any, tmp_path: Path) -> None:
    data = {"start": "0000", "base": "1100", "filtered": "1000"}
    cells = [cell("dream", seed, "1111", True, **data) for seed in (0, 1)] + [cell("s2r", 0, "1000", **data)]
    cells[0] |= {"cell": "twc.grpo.dream.seed0", "note": "greedy was not played", "advice": {"verdict": "stop", "why": "x"}}
    for number, each in enumerate(cells):
        (tmp_path / f"{number}.json").write_text(json.dumps(each))
    text = reproduce.tables.write_tables(tmp_path).read_text()
    assert "from the 3 finished cells" in text and text.count("## ") == 1
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:7] == [
        "| start, untrained | – | 0.00 [0.00, 0.32] | 0 | – |",
        "| SFT, successes | – | 0.50 [0.12, 0.88] | 0 | – |",
        "| SFT, filtered | – | 0.25 [0.00, 0.62] | 0 | – |",
        "| GRPO, in the dream, assisted by the world's rules | – | 1.00 [0.68, 1.00] | 0 | 2 |",
        "| GRPO, in the dream, then real | – | 0.25 [0.05, 0.70] | 800 | 2 |",
    ]
    assert rows[9] == (
        "| GRPO, in the dream, assisted by the world's rules − SFT, successes | temperature 1 "
        "| +0.50 [+0.12, +0.88] | 2, 0; 2, 0 | 0.5; 0.5 |"
    )
    assert rows[10].startswith(
        "| GRPO, in the dream, then real − SFT, successes | temperature 1 | -0.25 [-0.75, +0.00] | 0, 1 | 1 |"
    )
    assert text.endswith(
        "* `twc.grpo.dream.seed0`: advice before training: stop\n* `twc.grpo.dream.seed0`: greedy was not played\n"
    )
    (tmp_path / "cut.json").write_text('{"cell": ')
    with pytest.raises(ConfigurationError, match=r"cut\.json is damaged .*run its cell again"):
        reproduce.tables.write_tables(tmp_path)


def test_the_stored_results_are_those_of_the_stored_cells(reproduce: Any, tmp_path: Path) -> None:
    stored = FOLDER / "results"
    for file in stored.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert reproduce.tables.write_tables(tmp_path).read_text() == (stored / "RESULTS.md").read_text()
    for folder in (tmp_path, stored):
        assert "second tries, in the dream" in (folder / "success.svg").read_text()


def call(*arguments: str) -> str:
    done = subprocess.run([sys.executable, FOLDER / "run.py", *arguments], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_one_cell_from_nothing_and_then_none(tmp_path: Path) -> None:
    """An outsider's desk, from its logs and the dream compiled from them to the proof on its own tools."""
    small = str(Path(__file__).parent / "tiny" / "small_base")
    cell = ["--quick", "--only", "library.grpo.real.seed3", "--runs", str(tmp_path), "--model", small]
    assert "0 of 1 cells are done" in call(*cell)
    results = tmp_path / "quick" / "results"
    figures = json.loads((results / "library.grpo.real.seed3.json").read_text())
    assert set(figures["real"]) == {"start", "base", "offline_rl", "trained"} and figures["world"] == "library"
    assert len(figures["real"]["trained"]["greedy"]["outcomes"]) == 2 and all(figures["real_steps"].values())
    assert "| GRPO, real |" in (results / "RESULTS.md").read_text()
    listed = call(*cell, "--list")
    assert "1 of 1 cells are done" in listed and "done library.grpo.real.seed3" in listed


@pytest.mark.slow
def test_the_support_desks_cells_open_with_the_settings_of_their_learner(tmp_path: Path) -> None:
    program = """
import shutil
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run
traces = None
for cell in run.matching(["desk"], [1], ["*.dream.*", "*.model.*"]):
    folder = Path(sys.argv[2]) / cell.place
    if traces and not folder.exists():  # those of one seed are the same
        folder.mkdir()
        shutil.copy(traces, folder)
    s = (work := run.open_experiment(cell, folder, {})).settings
    traces = folder / "traces.jsonl"
    dream = [part.name for part in work.dream().responders]
    print(len(work.tasks("train")), cell, s.learner, s.num_tasks, s.iterations, s.base_steps, *dream)
"""
    done = subprocess.run([sys.executable, "-c", program, FOLDER, tmp_path], capture_output=True, text=True, timeout=280)
    assert done.stdout.splitlines()[-3:] == [
        "400 desk.rft.dream.seed1 rft 400 1 200 schema imputed recorded compiled",
        "400 desk.rft.model.seed1 rft 400 1 200 schema recorded model",
        "400 desk.grpo.dream.seed1 grpo 16 12 200 schema imputed recorded compiled",
    ], done.stderr[-2000:]
