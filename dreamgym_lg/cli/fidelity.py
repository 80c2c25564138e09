"""`dreamgym fidelity`: how far an experience model can be trusted, as a page and as figures."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dreamgym_lg.cli.console import console, errors_shown, progress_shown
from dreamgym_lg.cli.experiment import OptionalWorld, open_experiment
from dreamgym_lg.dream import Dream, usual_dream
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment import gate
from dreamgym_lg.experiment.experience_models import load_experience_model
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.fidelity import Fidelity, measure, write_fidelity
from dreamgym_lg.hosted.chat_model import EXAMPLE_MODEL, load_chat_model
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Trajectory

POLICY, UNSEEN = "the policy's own actions", "the policy's own actions, further panels"
_COLOUR = {"bad": "red", "watch": "yellow", "good": "green"}

Buffer = Annotated[
    Path | None, typer.Option(help="In place of an experiment: your own replay buffer.", exists=True, dir_okay=False)
]
Model = Annotated[
    str | None,
    typer.Option(
        help=f"With --replay-buffer: the experience model, e.g. {EXAMPLE_MODEL}, or the folder of a local one, "
        "e.g. runs/mine/models/experience-0."
    ),
]
Limit = Annotated[int, typer.Option(min=1, help="Episodes of each kind put to the model, drawn by --seed.")]
Judge = Annotated[str | None, typer.Option(help="Another chat model that scores dreamed episodes.")]
Replay = Annotated[
    bool, typer.Option("--replay/--no-replay", help="Play dreamed successes in the real environment (an experiment's only).")
]
Seed = Annotated[int, typer.Option(help="Decides which episodes are drawn.")]
Out = Annotated[Path | None, typer.Option(help="Where to write. Default: the experiment's folder, or beside the buffer.")]
Measure = Callable[..., Fidelity]
"""`measure` with the options of the command."""


def fidelity(
    world: OptionalWorld = None,
    replay_buffer: Buffer = None,
    experience_model: Model = None,
    limit: Limit = 100,
    judge_model: Judge = None,
    replay: Replay = True,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Measure an experience model on real trajectories; writes fidelity.html and fidelity.json.

    Of an experiment it is the newest one, on held-out data; of a replay buffer, the one that you name.
    """
    with errors_shown():
        check_source(world, replay_buffer, experience_model)
        judge = load_chat_model(judge_model) if judge_model else None
        with progress_shown() as progress:
            asked = partial(measure, limit=limit, judge_model=judge, seed=seed, on_progress=progress)
            if world is not None:
                work = open_experiment(world, existing=True)
                work.progress = progress
                measured, folder = _of_experiment(work, replay, asked, limit), work.out
            else:
                assert replay_buffer is not None and experience_model is not None  # by check_source
                measured, folder = _of_buffer(replay_buffer, experience_model, asked), replay_buffer.parent
        html, figures = write_fidelity(measured, out or folder)
    for level, sentence in measured.conclusions:
        console.print(f"[{_COLOUR[level]}]{level:>5}[/]  {sentence}", highlight=False, soft_wrap=True)
    console.print(f"report: {html}\nfigures: {figures}", soft_wrap=True)


def check_source(world: str | None, replay_buffer: Path | None, experience_model: str | None) -> None:
    """Raises `ConfigurationError` unless there is either a world, or a replay buffer and an experience model."""
    if (world is None) == (replay_buffer is None):
        raise ConfigurationError("give either a WORLD, or --replay-buffer with --experience-model")
    if replay_buffer is not None and not experience_model:
        raise ConfigurationError(
            f"--replay-buffer needs --experience-model, e.g. {EXAMPLE_MODEL} or runs/mine/models/experience-0"
        )
    if world is not None and experience_model:
        raise ConfigurationError(f"{world} has an experience model of its own: leave --experience-model away")


def dream_of(work: Experiment) -> Dream:
    """The dream of the newest experience model. Raises `ConfigurationError` before there is one."""
    if not work.can_dream:
        raise ConfigurationError(f"{work.out} holds no experience model yet: run `dreamgym train` with the same options first")
    return work.dream(own_process=False)


def _of_experiment(work: Experiment, replay: bool, measure: Measure, limit: int) -> Fidelity:
    dream = dream_of(work)
    offline, told = _offline(work)
    evaluations = (work.run_name("validate/"), work.run_name("proof/"))
    panels = tuple(work.run_name(f"proof/{name}/") for name in work.panels())
    runs = [t for t in work.replay_buffer.trajectories() if t.run.startswith(evaluations)]
    dreamed = any(t.success and t.source == "synthetic" for t in runs)
    create_environment = work.world.create_environment if replay and dreamed else None
    judgement = gate.measure(work, dream, limit=min(limit, gate.LIMIT)) if work.world.judged_by_dream else None
    notes = [told]
    if replay and create_environment is None:
        notes.append("The buffer holds no dreamed success of an evaluation, so none was replayed in the real environment.")
    return measure(
        dream,
        [*offline, *runs],
        create_environment=create_environment,
        judgement=judgement,
        notes=notes,
        group=lambda t: "offline data" if t.source == "offline" else UNSEEN if t.run.startswith(panels) else POLICY,
    )


def _offline(work: Experiment) -> tuple[list[Trajectory], str]:
    """Offline trajectories, held-out ones if there are any, and a sentence that says what was trained on them."""
    offline, held_out = work.offline(), work.held_out_offline()
    if not held_out:
        return offline, "Offline data: the experience model was trained on these trajectories, so their figures flatter it."
    count = f"{len(held_out):,} trajectories"
    told = f"Offline data: {count} that the experience model was not trained on, in worlds of the train split"
    if len(held_out) < len(offline):
        told += " (others of the same worlds were trained on"
        told += "; a refresh may have drawn on them)" if work.settings.refresh_episodes else ")"
    return held_out, f"{told}."


def _of_buffer(file: Path, model: str, measure: Measure) -> Fidelity:
    with ReplayBuffer(file) as buffer:
        found = list(buffer.trajectories())
        note = (
            "The trajectories are all of the buffer's. Those of train tasks can be retrieved (never for their own task); a "
            "model that was trained on them is not measured on held-out data by them."
        )
        notes = [note] if found else []
        return measure(usual_dream(load_experience_model(model, buffer)), found, notes=notes)
