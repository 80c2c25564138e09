"""`dreamgym fidelity`: measures an experience model, and writes a page and figures."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym_lg.cli.console import console, errors_shown, say
from dreamgym_lg.cli.experiment import ModelName, OptionalWorld, opened_dream
from dreamgym_lg.dream.prompter import finish_prompts
from dreamgym_lg.errors import DreamGymError
from dreamgym_lg.experiment import gate
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.fidelity import measure, write_fidelity
from dreamgym_lg.progress import show_progress
from dreamgym_lg.report.pages import check_installed
from dreamgym_lg.types import Trajectory

COLOURS = {"bad": "red", "watch": "yellow", "good": "green"}

BUFFER_HELP = "In place of an experiment: your own replay buffer."
OF_BUFFER = (
    "The trajectories are all of the buffer's. Those of train tasks can be retrieved (never for their own task); a model that "
    "was trained on them is not measured on held-out data by them."
)
OUT_HELP = "Where to write. Default: the experiment's folder, or beside the buffer."


def fidelity(
    world: OptionalWorld = None,
    replay_buffer: Annotated[Path | None, typer.Option(help=BUFFER_HELP, exists=True, dir_okay=False)] = None,
    experience_model: ModelName = None,
    limit: Annotated[int, typer.Option(min=1, help="Episodes of each kind put to the model, drawn by --seed.")] = 100,
    seed: Annotated[int, typer.Option(help="Decides which episodes are drawn.")] = 0,
    out: Annotated[Path | None, typer.Option(help=OUT_HELP)] = None,
) -> None:
    """Measure an experience model on real trajectories; writes fidelity.html and fidelity.json.

    For an experiment, its newest model is measured on held-out data; for a replay buffer, the one that you name.
    """
    with errors_shown():
        check_installed("jinja2", extra="report")  # before anything is measured, which may cost calls
        with opened_dream(world, replay_buffer, experience_model) as (buffer, dream, work):
            judgement = None
            if work is not None and gate.is_measured(work):
                judgement = gate.measure(work, dream, limit=min(limit, gate.LIMIT))
            episodes, note = (list(buffer.trajectories()), OF_BUFFER) if work is None else _of_experiment(work)
            episodes = episodes if dream.language_models else []  # without a model, the gate's measurement is complete
            options: dict[str, Any] = {"judgement": judgement, "notes": [note] if episodes else []}
            try:
                measured = measure(dream, episodes, limit=limit, seed=seed, on_progress=show_progress, **options)
            except DreamGymError:
                finish_prompts()  # their answers are stored: the same command resumes
                raise
        folder = replay_buffer.parent if replay_buffer is not None else work.out  # type: ignore[union-attr]
        html, figures = write_fidelity(measured, out or folder)
    for level, sentence in measured.conclusions:
        console.print(f"[{COLOURS[level]}]{level:>5}[/]  {sentence}", highlight=False, soft_wrap=True)
    say(f"report: {html}\nfigures: {figures}")


def _of_experiment(work: Experiment) -> tuple[list[Trajectory], str]:
    """Trajectories to measure on, and a note. Offline ones, held out if possible, and those of evaluations."""
    held_out, evaluations = work.held_out_offline(), (work.run_name("validate/"), work.run_name("proof/"))
    note = f"Offline data: {len(held_out):,} trajectories that the experience model was not trained on."
    if not held_out:
        note = "Offline data: the experience model was trained on these trajectories, so their figures flatter it."
    played = [each for each in work.replay_buffer.trajectories(source="real") if each.run.startswith(evaluations)]
    return [*(held_out or work.offline()), *played], note
