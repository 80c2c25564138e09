"""cookbook/reproduce: which cells there are, what each is given, what is counted, and the statistics of its tables."""

import csv
import json
import lzma
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dreamgym_lg import Experiment, ReplayBuffer, Step, Task, Trajectory
from dreamgym_lg.dream.prompts import LineFormat, in_hindsight
from dreamgym_lg.errors import ConfigurationError, DreamGymError, MissingDependency
from dreamgym_lg.statistics import wilson

pytest.importorskip("trl")
pytest.importorskip("textworld_express")

FOLDER = Path(__file__).parent.parent / "cookbook" / "reproduce"
PACKED = Path(__file__).parent / "integrations" / "alfworld" / "games.jsonl.xz"
"""Eight games of ALFWorld."""


@pytest.fixture(scope="module")
def reproduce() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    try:
        import cells
        import estimates
        import play
        import tables

        yield SimpleNamespace(cells=cells, play=play, estimates=estimates, tables=tables)
    finally:
        sys.path.remove(str(FOLDER))


# --- cells -----------------------------------------------------------------------------------------------------------------


def test_the_comparison_comes_first_for_every_seed_and_nothing_before_what_it_goes_on_from(reproduce: Any) -> None:
    c = reproduce.cells
    cells = c.all_cells(["twc", "peckingorder"], [0, 1], 10)
    names = [str(cell) for cell in cells]
    assert names[0] == "twc.sft.seed0" and len(set(names)) == len(names)
    parts = [c.METHODS[cell.method].part for cell in cells]
    assert list(dict.fromkeys(parts)) == ["comparison", "learners", "ablations", "data", "transfer"]
    assert names.index("peckingorder.real-grpo.i10.seed1") < names.index("twc.dream-ppo.i10.seed0")
    for place, cell in enumerate(cells):
        if c.METHODS[cell.method].place == "s2r":
            assert cells.index(cell.of(cell.method.replace("s2r", "dream"))) < place
    assert "twc.no-hidden.i10.seed0" not in names, "nothing is hidden there"
    assert c.create_cell("twc", "sft", 0, 10) == c.create_cell("twc", "sft", 0, 40), "no budget changes it"


def test_cells_by_pattern(reproduce: Any) -> None:
    c = reproduce.cells
    cells = c.all_cells(["peckingorder", "twc"], [0], 10)
    assert c.matching(cells, []) == cells
    assert {cell.world for cell in c.matching(cells, ["twc"])} == {"twc"}
    assert [str(cell) for cell in c.matching(cells, ["twc.dream-*", "sft"])] == [
        "peckingorder.sft.seed0",
        "twc.sft.seed0",
        "twc.dream-grpo.i10.seed0",
        "twc.dream-ppo.i10.seed0",
    ]
    with pytest.raises(ConfigurationError, match="--only 'dream' fits none"):
        c.matching(cells, ["dream"])
    with pytest.raises(ConfigurationError, match="unknown method 'grpo'"):
        c.create_cell("twc", "grpo", 0, 10)
    with pytest.raises(ConfigurationError, match="unknown world 'twc'; known: peckingorder"):
        c.create_cell("twc", "no-hidden", 0, 10)


def test_a_moved_policy_is_judged_in_the_other_games_and_has_the_budget_of_its_own(reproduce: Any) -> None:
    c = reproduce.cells
    moved = [str(cell) for cell in c.all_cells(c.WORLDS, [1], 7) if c.METHODS[cell.method].moved]
    assert len(moved) == 60 and moved[0] == "peckingorder.moved-sft-of-twc.seed1"
    assert {"twc.moved-dream-grpo-of-peckingorder.i7.seed1", "twc.moved-sft-of-peckingorder.seed1"} < set(moved)


def test_every_trained_cell_has_the_same_budget_and_differs_in_what_its_name_says(reproduce: Any) -> None:
    c, play = reproduce.cells, reproduce.play
    found = {}
    for cell in c.all_cells(["peckingorder"], [3], 7):
        if c.METHODS[cell.method].learner:
            found[cell.method] = play.settings_of(cell, play.create_world(cell).settings, play.Scale())
    assert {(s.iterations, s.num_tasks * s.num_generations, s.seed, s.max_gap) for s in found.values()} == {(7, 64, 3, None)}
    assert (found["dream-ppo"].num_generations, found["dream-ppo"].learner) == (1, "ppo")
    assert {name for name, s in found.items() if s.environment == "real"} == {n for n in found if n.startswith("real-")}
    assert {name for name, s in found.items() if s.real_steps == 800} == {"s2r-grpo", "s2r-ppo"}
    assert {name for name, s in found.items() if not s.retrieved} == {"no-replay"}


def test_what_an_ablation_leaves_out_of_its_world(reproduce: Any) -> None:
    create, cell = reproduce.play.create_world, reproduce.cells.create_cell
    task = Task(id="t", instruction="", environment="", observation="You are in the kitchen. ")
    whole, unchecked, open_book = (create(cell("peckingorder", m, 0, 1)) for m in ("dream-grpo", "no-check", "no-hidden"))
    assert whole.refusal(task, "fly", ["You are in the kitchen. "]) and whole.context is not None
    assert unchecked.refusal(task, "fly", ["You are in the kitchen. "]) is None
    assert open_book.context is None and unchecked.context is not None


def test_without_reasoning_nothing_but_the_verdict_is_learned_or_shown(reproduce: Any) -> None:
    steps = [
        Step(observation="o", action=act, next_observation="p", reward=float(n), valid=bool(n), terminated=bool(n))
        for n, act in enumerate(("fly", "take pear"))
    ]
    task = Task(id="t", instruction="", environment="", observation="o")
    with ReplayBuffer(":memory:") as buffer:
        buffer.add(Trajectory(task=task, steps=steps, source="offline", success=True, run="offline"))
        reproduce.play.leave_verdicts(buffer)
        (kept,) = buffer.trajectories(source="offline")
    answers = [LineFormat("").answer(in_hindsight(step, success=True)) for step in kept.steps]
    assert answers == ["invalid\nreward 0, continues\np", "valid\nreward 1, success\np"]


@pytest.mark.slow
def test_alfworld_is_played_where_it_is_asked_for(reproduce: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells are listed without it, and each says what is missing."""
    assert "alfworld" not in reproduce.cells.DEFAULT_WORLDS and "alfworld.sft.seed0" in call("--list", "--worlds", "alfworld")
    cell = reproduce.cells.create_cell("alfworld", "dream-grpo", 0, 3)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "none"))
    if find_spec("alfworld") is None:
        with pytest.raises(MissingDependency, match=r"pip install '\.\[alfworld\]'"):
            reproduce.play.open_experiment(cell, tmp_path / "run", reproduce.play.Scale())
        return
    run = reproduce.play.open_experiment(cell, tmp_path / "run", reproduce.play.Scale())
    assert (run.settings.iterations, run.settings.num_tasks, run.world.family) == (3, 8, "pick_and_place_simple")
    with pytest.raises(ConfigurationError, match=r"none does not exist; name the folder.*ALFWORLD_DATA"):
        run.collect()
    run.replay_buffer.close()


# --- folders and counts ------------------------------------------------------------------------------------------------------


def test_a_cell_goes_on_in_a_copy_of_what_it_shares(reproduce: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "base", tmp_path / "cell"
    (source / "models").mkdir(parents=True)
    for name in ("settings.json", "replay.db", "models/base"):
        (source / name).write_text("shared")
    (tmp_path / "cell.draft").mkdir()
    (tmp_path / "cell.draft" / "half").write_text("of a copy that was killed")
    reproduce.play.copied(source, target)
    assert sorted(path.name for path in target.rglob("*")) == ["base", "models", "replay.db"]
    (target / "replay.db").write_text("own")
    assert (reproduce.play.copied(source, target) / "replay.db").read_text() == "own"


def test_a_moved_policy_is_a_copy_of_its_own_cells(reproduce: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained in the game to which it is moved."""
    c, play = reproduce.cells, reproduce.play

    def folder(name: str, model: str) -> Path:
        (tmp_path / name / "models" / model).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "models" / model / "weights").write_text(f"{model} of {name}")
        return tmp_path / name

    monkeypatch.setattr(play, "prepare", lambda cell, *_: folder(f"{cell.world}-base", "base"))
    trained: list[str] = []

    def create(cell: Any, at: Path) -> Any:
        folder(str(at.relative_to(tmp_path)), "trained")
        closed = SimpleNamespace(close=lambda: None)
        return SimpleNamespace(train=lambda: trained.append(str(cell)), replay_buffer=closed)

    for method, said in (("sft", "base of peckingorder-base"), ("dream-grpo", "trained of peckingorder-seed0/i7-dream-grpo")):
        found = play.train(c.create_cell("twc", f"moved-{method}-of-peckingorder", 0, 7), tmp_path, create)
        assert (found / "models/trained/weights").read_text() == said
        assert (found / "models/base/weights").read_text() == "base of twc-base"
    assert trained == ["peckingorder.dream-grpo.i7.seed0"]


def episode(run: str, actions: Sequence[str], **values: Any) -> Trajectory:
    seen = "You are in the kitchen. "
    values = {"source": "real", "task": Task(id=run, instruction="", environment="", observation=seen), **values}
    steps = [Step(observation=seen, action=action, next_observation=seen) for action in actions]
    return Trajectory(steps=steps, run=run, success=False, **values)


@pytest.mark.parametrize(("error", "counts"), [("PredictionFailed: unreadable", True), ("ConnectionError: gone", False)])
def test_unreadable_answers_are_a_result_of_the_dream_and_missing_episodes_are_none(
    error: str, counts: bool, reproduce: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce.play, "policy_version", lambda policy: "p")
    run = SimpleNamespace(
        settings=SimpleNamespace(proof_tasks=2),
        policy=lambda name, temperature: None,
        tasks=lambda split: [None] * 3,
        dream=lambda: SimpleNamespace(version="e"),
        play=lambda name, policy, tasks, dream: [episode(name, (), error=error) for _ in tasks],
    )
    if counts:
        assert reproduce.play.proven(run, "trained", "greedy", dream=True)["outcomes"] == "00"
        return
    with pytest.raises(DreamGymError, match="gone"):
        reproduce.play.proven(run, "trained", "greedy", dream=True)


def test_every_real_step_is_counted_by_what_it_was_spent_on(reproduce: Any, tmp_path: Path) -> None:
    cell = reproduce.cells.create_cell("peckingorder", "dream-grpo", 0, 1)
    refused = Step(observation="", action="fly", next_observation="", valid=False, decided_by="rules")
    training = episode("train", ["look around", "look around"])
    run = Experiment(reproduce.play.create_world(cell), tmp_path)
    run.replay_buffer.extend(
        [
            episode("offline", ["look around"] * 5, source="offline"),
            replace(training, steps=[*training.steps, refused]),
            episode("train", ["look around"] * 9, source="synthetic", iteration=1),
            episode("train", ["look around"], iteration=2, error="EnvironmentFailed: it broke"),
            episode("validate/real", ["look around"] * 2),
            episode("validate/base-12ab", ["look around"] * 4),
            episode("proof/real/greedy/ab", ["look around"] * 7),
        ]
    )
    assert reproduce.play.count_real(cell, run) == {"offline": 5, "training": 3, "validation": 6, "proof": 7}


def test_a_part_of_the_data_keeps_the_tasks_and_the_base_policy(reproduce: Any, tmp_path: Path) -> None:
    run = Experiment(reproduce.play.create_world(reproduce.cells.create_cell("twc", "sft", 0, 0)), tmp_path / "base")
    with run.stage("base"):
        (run.models / "base").mkdir()
    tasks = [Task(id=str(n), instruction="", environment=run.world.name, split="train") for n in range(20)]
    run.replay_buffer.extend(episode("offline", ["look around"], source="offline", task=task) for task in tasks)
    first = [each.task.id for each in run.offline()[:5]]
    reproduce.play.copy_part(run, tmp_path / "part", 5)
    with ReplayBuffer(tmp_path / "part" / "replay.db") as buffer:
        assert [each.task.id for each in buffer.trajectories()] == first and len(buffer.tasks()) == 20
        assert buffer.metrics("stage/base") and not buffer.metrics("stage/experience")
    assert (tmp_path / "part" / "models" / "base").exists()


# --- statistics and tables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"), [(0, 0, 1.0), (5, 5, 1.0), (10, 2, 158 / 4096), (0, 6, 2 / 64), (6, 0, 2 / 64)]
)
def test_mcnemar(reproduce: Any, only_a: int, only_b: int, p: float) -> None:
    assert reproduce.estimates.mcnemar(only_a, only_b) == pytest.approx(p)


def test_the_interval_over_seeds(reproduce: Any) -> None:
    over_seeds, half = reproduce.estimates.over_seeds, [1, 0] * 50
    assert over_seeds([[1] * 3 + [0] * 7])[:3] == pytest.approx((0.3, *wilson(3, 10)))
    assert over_seeds([[1] * 10, [1] * 10])[:3] == pytest.approx((1, 1, 1))
    assert over_seeds([[1] * 10, [0] * 10])[:3] == (0.5, 0, 1), "two seeds that disagree say nothing"
    alike = over_seeds([half] * 30)  # only the worlds vary: sqrt(0.25 / 100 / 30) = 0.0091
    assert alike.value == 0.5 and (alike.high - alike.low) / 2 == pytest.approx(1.96 * 0.0091, rel=0.1)
    apart = over_seeds([[1] * 9 + [0]] * 15 + [[0] * 9 + [1]] * 15)  # seeds too: sqrt((0.16 + 0.09 / 10) / 30) = 0.0751
    assert apart.value == 0.5 and (apart.high - apart.low) / 2 == pytest.approx(1.96 * 0.0751, rel=0.1)
    assert over_seeds([[1, 0, 0, -1]])[:1] == (0,) and over_seeds([[1] * 6])[0] == 1
    for wrong in ([], [[]], [[1], [1, 0]]):
        with pytest.raises(ValueError, match="every seed needs as many"):
            over_seeds(wrong)


def figures(method: str, seed: int, sampled: str, iterations: int = 10, **values: Any) -> dict[str, Any]:
    def played(outcomes: str) -> dict[str, Any]:
        return {"successes": outcomes.count("1"), "episodes": len(outcomes), "reward": 0.5, "outcomes": outcomes}

    dreamed = {"sampled": played("1" * len(sampled))} if method.startswith(("dream", "s2r")) else {}
    return {
        "cell": f"twc.{method}.seed{seed}.{iterations}", "world": "twc", "method": method, "seed": seed,
        "iterations": iterations, "episodes": 64 * iterations, "dream": dreamed,
        "real": {"greedy": played("1" * len(sampled)), "sampled": played(sampled)},
        "best_iteration": None, "real_steps": {"offline": 9000, "training": 1000 * seed, "validation": 50, "proof": 99},
        "dreamed_steps": 300, "seconds": {"train": 120}, "training": [{}], "machine": "x86_64", **values,
    }  # fmt: skip


def test_pairs_are_of_the_same_worlds_and_seeds(reproduce: Any) -> None:
    compare = reproduce.estimates.compare
    first = [figures("dream-grpo", 0, "1110"), figures("dream-grpo", 1, "1100"), figures("dream-grpo", 2, "1111")]
    second = [figures("sft", 0, "1001"), figures("sft", 1, "0000"), figures("sft", 5, "1111")]
    found = compare(first, second, "sampled")
    assert (found.only_first, found.only_second, found.difference.seeds) == (4, 1, 2)
    assert found.difference.value == pytest.approx((0.25 + 0.5) / 2) and found.p == pytest.approx(0.375)
    assert compare(first, first, "sampled").difference[:3] == (0, 0, 0)
    assert compare(first, [figures("sft", 7, "1001")], "sampled") is None
    assert compare(first[:1], [figures("sft", 0, "1")], "sampled") is None, "not the same worlds"


def test_real_steps_for_the_same_success(reproduce: Any, tmp_path: Path) -> None:
    """Those before the first iteration that succeeds as often; where there is none, all of them are a lower bound."""
    curve = [{"iteration": i, "train_success": s, "real_steps": 300 + i} for i, s in enumerate((0.0, 0.5, 0.25, 0.75))]
    found = [reproduce.estimates.steps_until({"training": curve}, rate) for rate in (0, 0.5, 0.6, 0.75, 0.8)]
    assert found == [0, 300, 300 + 301 + 302, 300 + 301 + 302, None]
    cells = [figures("real-grpo", seed, "1110", training=curve) for seed in (1, 2)]
    cells += [figures("s2r-grpo", 1, "1110", training=[]), figures("s2r-grpo", 2, "1111", training=[])]
    for cell in cells:
        (tmp_path / f"{cell['cell']}.json").write_text(json.dumps(cell))
    text = reproduce.tables.write_tables(tmp_path)[0].read_text()
    assert "| DreamGym-S2R GRPO | 1 | 3/4 [0.30, 0.95] | 1,000, 50 | 903 | 0.9 | 0.9 |" in text
    assert "| DreamGym-S2R GRPO | 2 | 4/4 [0.51, 1.00] | 2,000, 50 | not in 2,000 | > 1.0 | > 1.0 |" in text
    assert "| DreamGym-S2R GRPO | all 2 |  |  |  | > 1.0 [0.9, 1.0] | > 1.0 [0.9, 1.0] |" in text


def test_savings_over_seeds(reproduce: Any) -> None:
    saving, over = reproduce.estimates.Saving, reproduce.estimates.savings_over_seeds
    assert over([saving(2.0, True), saving(8.0, True)]) == "4.0 [2.0, 8.0]"
    assert over([saving(2.0, True), saving(8.0, False)]) == "> 4.0 [2.0, 8.0]"
    assert over([saving(3.0, True)]) == "3.0"
    dreamed = figures("dream-grpo", 0, "1110")
    assert reproduce.estimates.saving(dreamed, figures("real-grpo", 0, "1110"), ("training",)) is None, "it spent none"


def test_tables_are_made_from_the_figures(reproduce: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [figures("sft", seed, "1100", iterations=0, episodes=0) for seed in (0, 1)]
    cells += [figures("dream-grpo", seed, "1111") for seed in (0, 1)]
    cells += [figures("dream-grpo", 0, "1110", iterations=40), figures("no-check", 0, "0000", iterations=40)]
    for cell in cells:
        (tmp_path / f"{cell['cell']}.json").write_text(json.dumps(cell))
    (tmp_path / "remarks").mkdir()
    for world in ("twc", "sorting"):
        (tmp_path / "remarks" / f"{world}.md").write_text(f"What was tried in {world}.\n")
    written = reproduce.tables.write_tables(tmp_path)
    assert [path.name for path in written] == ["RESULTS.md", "results.csv", "results.png"]
    assert written[2].read_bytes().startswith(b"\x89PNG")
    told, ten, forty = written[0].read_text().split("\n## twc")
    assert forty.count("What was tried in twc.") == ten.count("What was tried in twc.") == 1
    assert "## sorting: no cell\n\nWhat was tried in sorting.\n" in forty
    assert "from the 6 finished cells" in told and ten.startswith(", 10 iterations") and "no-check" not in ten
    assert (
        "| DreamGym GRPO | 2 | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] | 500 | 50 | 9,000 | 300 | 2 |" in ten
    )
    assert "| DreamGym GRPO | SFT: the base policy | temperature 1 | +0.50 [+0.12, +0.88] | 2 | 4, 0 | 0.12 |" in ten
    assert "SFT: the base policy" in forty and "Ablations" in forty and "Ablations" not in ten
    assert "| without the action check | DreamGym GRPO | temperature 1 | -0.75 [-1.00, -0.25] | 1 | 0, 3 | 0.25 |" in forty
    assert "| `twc.dream-grpo.seed0.40` | 4/4 [0.51, 1.00] | 3/4 [0.30, 0.95] | 4/4 [0.51, 1.00] | – | 0 | x86_64 |" in forty
    (tmp_path / "cut.json").write_text('{"cell": ')
    with pytest.raises(ConfigurationError, match=r"cut\.json is damaged .*run its cell again"):
        reproduce.tables.load_results(tmp_path)
    rows = list(csv.DictReader(written[1].open()))
    assert len(rows) == 6 and {row["real_steps_offline"] for row in rows} == {"9000"}
    assert [row["real_sampled_successes"] for row in rows] == ["2", "2", "4", "3", "4", "0"]


# --- the command -------------------------------------------------------------------------------------------------------------


def call(*arguments: str, seconds: int = 60) -> str:
    done = subprocess.run([sys.executable, FOLDER / "run.py", *arguments], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_one_cell_from_nothing_and_then_none(tmp_path: Path) -> None:
    chosen = ["--only", "real-grpo", "--worlds", "peckingorder", "--seeds", "0", "--iterations", "1"]
    cell = ["--quick", *chosen, "--runs", str(tmp_path)]  # no experience model, whose training is most of another cell's time
    assert "0 of 1 cells are done" in call(*cell, seconds=280)
    results = tmp_path / "quick" / "results"
    found = json.loads((results / "peckingorder.real-grpo.i1.seed0.json").read_text())
    assert len(found["real"]["greedy"]["outcomes"]) == 6 and found["dream"] == {}
    assert found["dreamed_episodes"] == found["dreamed_steps"] == 0
    assert all(found["real_steps"].values())
    assert "GRPO, real" in (results / "RESULTS.md").read_text()
    assert "1 of 1 cells are done" in call(*cell) and "1 of 1 cells are done" in call(*cell, "--list")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("alfworld") is None, reason="needs alfworld")
def test_a_cell_of_alfworld_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On copies of one of the games that the tests of its adapter have, as games of every split."""
    shared, *games = lzma.decompress(PACKED.read_bytes()).splitlines()
    game = next(each for each in map(json.loads, games) if "SprayBottle" in each["id"])
    splits = {"train": range(400, 430), "valid_seen": range(3)}
    copies = [
        {**game, "split": split, "id": f"pick_and_place_simple-SprayBottle-None-Toilet-{room}/trial_{split}"}
        for split, rooms in splits.items()
        for room in rooms
    ]
    (tmp_path / "games.jsonl.xz").write_bytes(lzma.compress(b"\n".join([shared, *(json.dumps(c).encode() for c in copies)])))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "games.jsonl.xz"))
    chosen = ["--quick", "--worlds", "alfworld", "--only", "sft", "--seeds", "0", "--runs", str(tmp_path)]
    assert "0 of 1 cells are done" in call(*chosen, seconds=280)
    found = json.loads((tmp_path / "quick" / "results" / "alfworld.sft.seed0.json").read_text())
    assert found["real"]["sampled"]["episodes"] == 3 and found["offline_trajectories"] == 20
    assert found["offline_successes"] >= 2 and all(found["real_steps"][kind] for kind in ("offline", "validation", "proof"))
