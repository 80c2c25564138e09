"""One cell: its shared folders, its training, its evaluation, and the figures that are kept of it."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cells import METHODS, Cell, create_cell

from dreamgym_lg import Experiment, ReplayBuffer, Settings, Trajectory, World
from dreamgym_lg.experiment.evaluation import MODES
from dreamgym_lg.experiment.experience_models import policy_version
from dreamgym_lg.experiment.workspace import TRAIN
from dreamgym_lg.integrations.textworld_express.world import TextWorldExpressWorld
from dreamgym_lg.replay.rows import FAILED
from dreamgym_lg.rollout import check_played, is_missing, real_steps
from dreamgym_lg.types import Source

DESK = Path(__file__).parent.parent / "support_desk"
SMALL_BASE = str(Path(__file__).parents[2] / "tests/tiny/small_base")
"""The model of 3 M parameters that the recorded cells began with."""
KINDS = ("offline", "training", "validation", "proof")
"""What real steps are spent on. `training`: rollouts of the policy; the paper counts these and the offline ones."""
CURVE = ("iteration", "train_success", "reward_mean", "real_steps")
"""What is kept of each iteration; `real_steps` are those of its own rollouts, where they were real."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much a cell is given: the same for every method of a table."""

    episodes: int = 64
    """Of an iteration: 8 tasks x 8 for GRPO, RFT and DPO, 64 x 1 for PPO (the paper: 16 x 8 and 128 x 1)."""
    group: int = 8
    real_steps: int = 800
    """Of the real part of S2R, which ends in the iteration that reaches them."""
    more_steps: int = 300
    """Optimiser steps of `sft-more` behind the base policy's."""
    traces: int = 500
    """Of the support desk."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of every experiment, in place of the world's."""


TINY = Scale(
    episodes=8,
    group=4,
    real_steps=20,
    more_steps=4,
    traces=60,
    settings={
        "tasks": 120, "episodes": {"demonstration": 2, "random": 6, "unfinished": 12}, "batch_size": 4, "experience_steps": 8,
        "base_steps": 20, "evaluate_tasks": 4, "proof_tasks": 6, "panel_tasks": 0,
    },
)  # fmt: skip
"""See every part work."""


PECKINGORDER = {"experience_steps": 200, "proof_tasks": 120, "panel_tasks": 40}
"""What a comparison gives this game, whose own settings are those of `make demo` and its minutes."""


def settings_of(cell: Cell, world: Settings, scale: Scale) -> Settings:
    """The settings of a cell: its world's, and what is the same for all so that they can be compared.

    No training ends early, and no dream is refused: that it lies is a result here.
    """
    method = METHODS[cell.method]
    s = replace(world, **{
        "seed": cell.seed, "evaluate_every": 5, "stop_after_uniform": 0, "max_gap": None,
        "max_false_success": None, "model": SMALL_BASE,
        **(PECKINGORDER if cell.world == "peckingorder" else {}), **scale.settings,
    })  # fmt: skip
    s = s if world.episodes else replace(s, tasks=None, episodes={})  # recorded already
    if method.without == "replay":
        s = replace(s, retrieved=0)
    if method.learner is None:
        return s
    group = 1 if method.learner == "ppo" else scale.group
    return replace(
        s,
        learner=method.learner,
        environment=method.place,
        real_steps=scale.real_steps if method.place == "s2r" else None,
        iterations=cell.iterations,
        num_tasks=scale.episodes // group,
        num_generations=group,
    )


# --- worlds --------------------------------------------------------------------------------------------------------------


class _Unchecked(TextWorldExpressWorld):
    """A game whose dream answers every action itself; the real environment refuses what it always does."""

    def refusal(self, task: object, action: str, observations: object) -> None:
        return None


def create_world(cell: Cell) -> World:
    """The world of a cell, without what its method leaves out. The support desk's is made by `open_experiment`."""
    without = METHODS[cell.method].without
    game = _Unchecked if without == "check" else TextWorldExpressWorld
    world: World = create_alfworld() if cell.world == "alfworld" else game(cell.world)
    if cell.world == "sorting":
        world.settings = replace(world.settings, episodes={"demonstration": 4, "random": 400, "unfinished": 1500})
    if without == "hidden":
        world.context = None
    return world


def create_alfworld() -> World:
    """ALFWorld's pick-and-place tasks, of the games at $ALFWORLD_DATA. Raises `DreamGymError` without the package."""
    from dreamgym_lg.integrations.alfworld.world import ALFWorldWorld

    world = ALFWorldWorld(family="pick_and_place_simple", max_steps=12)
    world.settings = replace(
        world.settings,
        tasks=None,
        episodes={"demonstration": 480, "random": 240},
        experience_steps=150,
        experience_tokens=256,
        batch_size=4,
        evaluate_tasks=16,
    )
    return world


def open_experiment(cell: Cell, folder: Path, scale: Scale, **shown: Any) -> Experiment:
    """The experiment in a folder of this cell. Args: `shown`, `progress` and `say` of `Experiment`."""
    if cell.world != "desk":
        world = create_world(cell)
        return Experiment(world, folder, settings_of(cell, world.settings, scale), **shown)
    sys.path.insert(0, str(DESK))
    from glue import SETTINGS, create_gym
    from old_policy import write_traces
    from tickets import Shop, create_shop

    # as a judge its experience model is refused: recorded successes judge
    folder.mkdir(parents=True, exist_ok=True)
    dreamed = METHODS[cell.method].place != "real"
    settings = replace(SETTINGS, references_only=dreamed, proof_tasks=150)
    tasks = create_shop(folder / "shop.db", seed=cell.seed, train=scale.traces)
    shop = Shop(folder / "shop.db")
    if not (folder / "traces.jsonl").exists():
        write_traces(folder / "traces.jsonl", shop, [task for task in tasks if task.split == "train"], seed=cell.seed)
    unseen = [task for task in tasks if task.split != "train"]
    found: Experiment = create_gym(shop, unseen, folder, settings=settings_of(cell, settings, scale), **shown)
    return found


# --- shared folders ------------------------------------------------------------------------------------------------------

Open = Callable[[Cell, Path], Experiment]


def prepare(cell: Cell, runs: Path, create: Open) -> Path:
    """The folder that a cell goes on from, made where it is missing: data and base policy, or the dream as well."""
    method, shared = METHODS[cell.method], runs / f"{cell.world}-seed{cell.seed}"
    base = cell.of("sft")
    run = create(base, shared / "base")
    run.collect()
    run.train_base()
    run.replay_buffer.close()
    if method.learner is None or method.place == "real":
        return shared / "base"
    if method.place == "s2r":  # its first part is the dreamed cell
        return train(cell.of(cell.method.replace("s2r", "dream")), runs, create)
    own = method.without in ("replay", "reasoning", "check", "hidden") or method.trajectories
    folder = shared / f"experience-{cell.method}" if own else shared / "experience"
    if method.trajectories and not folder.exists():
        copy_part(create(base, shared / "base"), folder, method.trajectories)
    run = create(cell, copied(shared / "base", folder))
    if method.without == "reasoning":
        leave_verdicts(run.replay_buffer)
    run.train_experience()
    run.replay_buffer.close()
    return folder


def leave_verdicts(buffer: ReplayBuffer) -> None:
    """Nothing but `valid` or `invalid` as the reasoning of every recorded step, so that no model learns or is shown more."""
    for each in list(buffer.trajectories(source="offline")):
        buffer.set_reasoning(each, ["valid" if step.valid else "invalid" for step in each.steps])


def copied(source: Path, target: Path) -> Path:
    """A folder of its own that begins as another is now; made once, and either whole or not there."""
    if not target.exists():
        draft = target.with_name(f"{target.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(source, draft, ignore=shutil.ignore_patterns("settings.json"))
        draft.rename(target)
    return target


def copy_part(base: Experiment, folder: Path, trajectories: int) -> None:
    """A folder like that of `base` whose replay buffer holds so many of its offline trajectories, drawn by the seed.

    The tasks stay all there: the policy trains on them.
    """
    draft = folder.with_name(f"{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(base.models, draft / "models")
    with ReplayBuffer(draft / "replay.db") as buffer:
        buffer.add_tasks(base.replay_buffer.tasks())
        buffer.extend(base.offline()[:trajectories])
        for stage in ("collect", "base"):
            for row in base.replay_buffer.metrics(f"stage/{stage}"):
                buffer.record_metrics(f"stage/{stage}", 0, {"seconds": row["seconds"]})
    base.replay_buffer.close()
    draft.rename(folder)


# --- training and evaluation ---------------------------------------------------------------------------------------------


def train(cell: Cell, runs: Path, create: Open) -> Path:
    """Train the policy of a cell, or go on with it; returns its folder."""
    shared, method = prepare(cell, runs, create), METHODS[cell.method]
    budget = f"i{cell.iterations}-" if cell.iterations else ""
    folder = copied(shared, runs / f"{cell.world}-seed{cell.seed}" / f"{budget}{cell.method}")
    if method.moved:
        origin = create_cell(*method.moved, cell.seed, cell.iterations)
        copied(train(origin, runs, create) / "models" / policy_of(origin), folder / "models" / "trained")
    if method.learner is None:
        return folder
    run = create(cell, folder)
    run.train()
    run.replay_buffer.close()
    return folder


def policy_of(cell: Cell) -> str:
    """Which of the policies in its folder is a cell's."""
    return "base" if cell.method == "sft" else "trained"


def train_more(run: Experiment, steps: int) -> None:
    """Train the base policy further on every recorded success, as long as it takes: no validation ends it or chooses."""
    from dreamgym_lg.integrations.transformers.loading import load_tokenizer
    from dreamgym_lg.integrations.trl.sft import fine_tune

    s, start = run.settings, run.models / "base"
    successes = [each for each in run.offline() if each.success and not each.invalid_actions]
    fine_tune(
        start,
        run.models / "trained",
        run.world.policy_rows(successes, load_tokenizer(start), max_new_tokens=s.policy_tokens),
        steps=steps,
        batch_size=s.batch_size,
        seed=s.seed,
        on_step=lambda step, loss: run.progress(f"supervised further (loss {loss:.2f})", step, steps),
    )


def run_cell(cell: Cell, runs: Path, results: Path, scale: Scale, **shown: Any) -> dict[str, Any]:
    """Everything of a cell that is not done yet; writes `results/CELL.json` and returns what it holds.

    Killed at any moment, the same call goes on; a finished cell returns at once.
    """
    file = results / f"{cell}.json"
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    folder = train(cell, runs, partial(open_experiment, scale=scale, **shown))
    run = open_experiment(cell, folder, scale, **shown)
    if cell.method == "sft-more" and not (run.models / "trained").exists():
        run.open()
        train_more(run, scale.more_steps)
    figures = describe(cell, run, scale)
    run.replay_buffer.close()
    results.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(figures, indent=1) + "\n")
    draft.rename(file)
    return figures


def describe(cell: Cell, run: Experiment, scale: Scale) -> dict[str, Any]:
    """The figures of a trained cell; episodes of its evaluation that are stored already are not played again."""
    method = METHODS[cell.method]
    real = {mode: proven(run, policy_of(cell), mode) for mode in MODES}
    dreamed = method.learner is not None and method.place != "real"
    says = dreamed and not run.settings.references_only  # which judges no held-out task
    dream = {"sampled": proven(run, policy_of(cell), "sampled", dream=True)} if says else {}
    played = [len(t.steps) for t in run.replay_buffer.trajectories(run=run.run_name(TRAIN), source="synthetic")]
    metrics = run.replay_buffer.metrics(run.run_name(TRAIN))
    seconds = {stage: round(run.seconds(stage) or 0) for stage in ("collect", "experience", "base")}
    # by iterations: the stage's own time is that of the last call alone
    seconds["train"] = round(sum(row[key] for row in metrics for key in row if key.startswith("seconds_")))
    default = asdict(replace(run.world.settings, seed=cell.seed))
    return {
        "cell": str(cell),
        **cell._asdict(),
        "title": method.title,
        "episodes": cell.iterations * scale.episodes,
        "real": real,
        "dream": dream,
        "best_iteration": best_iteration(run),
        "real_steps": count_real(cell, run),
        "dreamed_steps": sum(played),
        "dreamed_episodes": len(played),
        "offline_trajectories": sum(1 for _ in run.replay_buffer.trajectories(source="offline")),
        "offline_successes": sum(each.success for each in run.replay_buffer.trajectories(source="offline")),
        "seconds": seconds,
        "settings": {name: value for name, value in asdict(run.settings).items() if default[name] != value},
        "training": [{k: row[k] for k in CURVE if k in row} for row in metrics],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {os.environ.get('OMP_NUM_THREADS', 'all')} torch threads",
        "versions": {name: version(name) for name in ("dreamgym-lg", "torch", "trl")},
    }


def proven(run: Experiment, name: str, mode: str, *, dream: bool = False) -> dict[str, Any]:
    """A policy on the held-out tasks: how many succeed, and which of them (`1`, in the order of the tasks)."""
    policy, tasks = run.policy(name, MODES[mode]), run.tasks("test")[: run.settings.proof_tasks]
    dreamt = run.dream() if dream else None
    stored = f"proof/{f'dream@{dreamt.version}' if dreamt else 'real'}/{mode}/{policy_version(policy)}"
    episodes = run.play(stored, policy, tasks, dream=dreamt)
    if dreamt is None or any(is_missing(each.error) for each in episodes):
        check_played(episodes)  # but a dream whose every answer is unreadable is a result
    return {
        "successes": sum(each.success for each in episodes),
        "episodes": len(episodes),
        "reward": round(sum(each.reward for each in episodes) / len(episodes), 4),
        "outcomes": "".join(str(int(each.success)) for each in episodes),
    }


def best_iteration(run: Experiment) -> int | None:
    """After which iteration the policy was the one that is kept; None where there is no such choice."""
    return next((row["at"] for row in run.replay_buffer.metrics(run.run_name("best/best"))), None)


def count_real(cell: Cell, run: Experiment) -> dict[str, int]:
    """Every step that reached the real environment, by what it was spent on (`KINDS`), the shared folders' included."""
    counted = dict.fromkeys(KINDS, 0)
    sources: tuple[Source, ...] = ("offline", "real")
    for source in sources:
        for each in run.replay_buffer.trajectories(source=source):
            counted[_kind(each, run)] += real_steps([each])
    return counted


def _kind(each: Trajectory, run: Experiment) -> str:
    if each.source == "offline":
        return "offline"
    name = each.run.partition(FAILED)[0].removeprefix(run.run_name(""))
    if name == TRAIN:
        return "training"
    first = name.partition("/")[0]
    return {"validate": "validation", "proof": "proof"}[first]
