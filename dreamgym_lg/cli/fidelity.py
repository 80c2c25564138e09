"""`dreamgym fidelity`: how far an experience model can be trusted, as a page and as figures."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym_lg.cli.console import console, errors_shown, progress_shown
from dreamgym_lg.cli.experiment import open_experiment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.chat_models import load_chat_model, to_experience_model
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.fidelity import Fidelity, measure, write_fidelity
from dreamgym_lg.fidelity.ask import ABLATIONS
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Trajectory

POLICY, UNSEEN = "the policy's own actions", "the policy's own actions, further panels"
_COLOUR = {"bad": "red", "watch": "yellow", "good": "green"}

ExperimentArgument = Annotated[
    str | None, typer.Argument(metavar="[WORLD]", help="The folder of an experiment, or FILE.py:NAME of one.")
]
Buffer = Annotated[Path | None, typer.Option(help="In place of a folder: your own replay buffer.", exists=True, dir_okay=False)]
Model = Annotated[str | None, typer.Option(help="With --replay-buffer: the experience model, e.g. openai:gpt-5-mini.")]
Limit = Annotated[int, typer.Option(min=1, help="Episodes of each kind put to the model, drawn by --seed.")]
Without = Annotated[list[str] | None, typer.Option(help=f"Ablation, may be repeated: {', '.join(ABLATIONS)}.")]
Judge = Annotated[str | None, typer.Option(help="Another chat model that scores dreamed episodes, e.g. openai:gpt-5.")]
Replay = Annotated[bool, typer.Option(help="Play dreamed successes in the real environment (a run folder's only).")]
Seed = Annotated[int, typer.Option(help="Decides which episodes are drawn.")]
Out = Annotated[Path | None, typer.Option(help="Where to write; default: the run folder, or beside the buffer.")]


def fidelity(
    experiment: ExperimentArgument = None,
    replay_buffer: Buffer = None,
    experience_model: Model = None,
    limit: Limit = 100,
    without: Without = None,
    judge_model: Judge = None,
    replay: Replay = True,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Measure an experience model on real trajectories; writes fidelity.html and fidelity.json."""
    with errors_shown():
        if (experiment is None) == (replay_buffer is None):
            raise ConfigurationError("give either an experiment or --replay-buffer with --experience-model")
        options: dict[str, Any] = {"limit": limit, "without": without or [], "seed": seed}
        if judge_model:
            options["judge_model"] = load_chat_model(judge_model)
        with progress_shown() as progress:
            options["on_progress"] = progress
            if experiment is not None:
                work = open_experiment(experiment)
                measured, folder = _of_experiment(work, replay, options), work.out
            else:
                assert replay_buffer is not None
                measured, folder = _of_buffer(replay_buffer, experience_model, options), replay_buffer.parent
        html, figures = write_fidelity(measured, out or folder)
    for level, sentence in measured.conclusions:
        console.print(f"[{_COLOUR[level]}]{level:>5}[/]  {sentence}", highlight=False, soft_wrap=True)
    console.print(f"report: {html}\nfigures: {figures}", soft_wrap=True)


def _of_experiment(work: Experiment, replay: bool, options: dict[str, Any]) -> Fidelity:
    experience = work.experience(own_process=False)
    if experience.model is None:
        raise ConfigurationError(f"{work.out} holds no experience model yet: run `dreamgym train` with the same options first")
    offline, told = held_out(work)
    evaluations = (work.run_name("validate/"), work.run_name("proof/"))
    panels = tuple(work.run_name(f"proof/{name}/") for name in work.panels())
    runs = [t for t in work.replay_buffer.trajectories() if t.run.startswith(evaluations)]
    dreamed = any(t.success and t.source == "synthetic" for t in runs)
    create_environment = work.world.create_environment if replay and dreamed else None
    notes = [told]
    if replay and create_environment is None:
        notes.append("The buffer holds no dreamed success of an evaluation, so none was replayed in the real environment.")
    return measure(
        experience, [*offline, *runs], check_action=work.world.check_action, create_environment=create_environment, notes=notes,
        group=lambda t: "offline data" if t.source == "offline" else UNSEEN if t.run.startswith(panels) else POLICY,
        **options,
    )  # fmt: skip


def held_out(work: Experiment) -> tuple[list[Trajectory], str]:
    """The offline trajectories that the experience model was not trained on, and a sentence that says so.

    `Experiment.train_experience` takes them in this order, as many as its steps need. If that was all of them, all are given
    back and the sentence warns.
    """
    s, offline = work.settings, work.offline()
    trained = s.batch_size * s.experience_steps
    if not offline[trained:]:
        return offline, "Offline data: the experience model was trained on these trajectories, so their figures flatter it."
    told = (
        f"Offline data: {len(offline[trained:]):,} trajectories that the experience model was not trained on, in worlds of the "
        "train split (others of the same worlds were trained on"
    )
    return offline[trained:], told + ("; a refresh may have drawn on them)." if s.refresh_episodes else ").")


def _of_buffer(file: Path, model: str | None, options: dict[str, Any]) -> Fidelity:
    if not model:
        raise ConfigurationError("--replay-buffer needs --experience-model, e.g. openai:gpt-5-mini")
    with ReplayBuffer(file) as buffer:
        found = list(buffer.trajectories())
        note = (
            "The trajectories are all of the buffer's. Those of train tasks can be retrieved (never for their own task); a "
            "model that was trained on them is not measured on held-out data by them."
        )
        return measure(to_experience_model(model, buffer), found, notes=[note] if found else [], **options)
