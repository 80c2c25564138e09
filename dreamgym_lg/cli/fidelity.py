"""`dreamgym fidelity`: how far an experience model can be trusted, as a page and as figures."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.fidelity import Fidelity, measure, write_fidelity
from dreamgym_lg.fidelity.ask import ABLATIONS
from dreamgym_lg.fidelity.measure import OnProgress
from dreamgym_lg.types import Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.experiment.experiment import Demo

console = Console()

POLICY, UNSEEN = "the policy's own actions", "the policy's own actions, unseen objects"
_COLOUR = {"bad": "red", "watch": "yellow", "good": "green"}

RunFolder = Annotated[Path | None, typer.Argument(help="The output folder of `dreamgym demo` or `dreamgym train`.")]
Buffer = Annotated[Path | None, typer.Option(help="In place of a folder: your own replay buffer.", exists=True, dir_okay=False)]
Model = Annotated[str | None, typer.Option(help="With --replay-buffer: the experience model, e.g. openai:gpt-5-mini.")]
Limit = Annotated[int, typer.Option(min=1, help="Episodes of each kind put to the model, drawn by --seed.")]
Without = Annotated[list[str] | None, typer.Option(help=f"Ablation, may be repeated: {', '.join(ABLATIONS)}.")]
Judge = Annotated[str | None, typer.Option(help="Another chat model that scores dreamed episodes, e.g. openai:gpt-5.")]
Replay = Annotated[bool, typer.Option(help="Play dreamed successes in the real environment (a run folder's only).")]
Seed = Annotated[int, typer.Option(help="Decides which episodes are drawn.")]
Out = Annotated[Path | None, typer.Option(help="Where to write; default: the run folder, or beside the buffer.")]


def fidelity(
    run_folder: RunFolder = None, replay_buffer: Buffer = None, experience_model: Model = None, limit: Limit = 100,
    without: Without = None, judge_model: Judge = None, replay: Replay = True, seed: Seed = 0, out: Out = None,
) -> None:  # fmt: skip
    """Measure an experience model on real trajectories; writes fidelity.html and fidelity.json."""
    try:
        if (run_folder is None) == (replay_buffer is None):
            raise ConfigurationError("give either a run folder or --replay-buffer with --experience-model")
        options: dict[str, Any] = {"limit": limit, "without": without or [], "seed": seed}
        if judge_model:
            options["judge_model"] = _chat_model(judge_model)
        with _progress() as progress:
            options["on_progress"] = progress
            if run_folder is not None:
                measured = _of_folder(run_folder, replay, options)
            else:
                assert replay_buffer is not None
                measured = _of_buffer(replay_buffer, experience_model, options)
        html, figures = write_fidelity(measured, out or run_folder or replay_buffer.parent)  # type: ignore[union-attr]
    except DreamGymError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    for level, sentence in measured.conclusions:
        console.print(f"[{_COLOUR[level]}]{level:>5}[/]  {sentence}", highlight=False, soft_wrap=True)
    console.print(f"report: {html}\nfigures: {figures}", soft_wrap=True)


def _of_folder(folder: Path, replay: bool, options: dict[str, Any]) -> Fidelity:
    for name in ("OMP_WAIT_POLICY", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "PASSIVE" if name == "OMP_WAIT_POLICY" else "1")
    demo = open_run(folder)
    experience = demo.experience(own_process=False)
    if experience.model is None:
        raise ConfigurationError(f"{folder} holds no experience model yet: run `dreamgym train` with the same options first")
    offline, told = held_out(demo)
    runs = [t for t in demo.replay_buffer.trajectories() if t.run.startswith(("validate/", "proof/"))]
    create_environment: Any = demo.pool.create if replay and any(t.success and t.source == "synthetic" for t in runs) else None
    notes = [told]
    if replay and create_environment is None:
        notes.append("The buffer holds no dreamed success of an evaluation, so none was replayed in the real environment.")
    return measure(
        experience, [*offline, *runs], check_action=demo.check_action, create_environment=create_environment, notes=notes,
        group=lambda t: "offline data" if t.source == "offline" else UNSEEN if t.run.startswith("proof/transfer/") else POLICY,
        **options,
    )  # fmt: skip


def open_run(folder: Path) -> "Demo":
    from dreamgym_lg.experiment.experiment import Demo
    from dreamgym_lg.experiment.settings import Settings

    file = folder / "settings.json"
    if not file.exists():
        raise ConfigurationError(f"{folder} is no run folder (it has no settings.json); give one that `dreamgym demo` made")
    try:
        settings = Settings(**json.loads(file.read_text()))
    except TypeError as error:
        raise ConfigurationError(f"{file} was written by another version of dreamgym-lg: {error}") from None
    return Demo(folder, settings)


def held_out(demo: "Demo") -> tuple[list[Trajectory], str]:
    """The offline trajectories that the experience model was not trained on, and a sentence that says so.

    `Demo.train_models` shuffles them by the seed and trains on as many as its steps take. If that was all of them, all are
    given back and the sentence warns.
    """
    s = demo.settings
    offline = list(demo.replay_buffer.trajectories(run="offline"))
    Random(s.seed).shuffle(offline)
    trained = s.batch_size * s.experience_steps
    if not offline[trained:]:
        return offline, "Offline data: the experience model was trained on these trajectories, so their figures flatter it."
    told = (
        f"Offline data: {len(offline[trained:]):,} trajectories that the experience model was not trained on, in worlds of the "
        "train split (others of the same worlds were trained on"
    )
    return offline[trained:], told + ("; a refresh may have drawn on them)." if s.refresh_episodes else ").")


def _of_buffer(file: Path, model: str | None, options: dict[str, Any]) -> Fidelity:
    from dreamgym_lg.gym import to_experience
    from dreamgym_lg.replay.buffer import ReplayBuffer

    if not model:
        raise ConfigurationError("--replay-buffer needs --experience-model, e.g. openai:gpt-5-mini")
    with ReplayBuffer(file) as buffer:
        found = list(buffer.trajectories())
        note = (
            "The trajectories are all of the buffer's. Those of train tasks can be retrieved (never for their own task); a "
            "model that was trained on them is not measured on held-out data by them."
        )
        return measure(to_experience(model, buffer), found, notes=[note] if found else [], **options)


def _chat_model(name: str) -> Any:
    try:
        from langchain.chat_models import init_chat_model
    except ImportError as error:
        raise ConfigurationError(f"--judge-model {name} needs: pip install langchain langchain-<provider>") from error
    return init_chat_model(name, temperature=0)


@contextmanager
def _progress() -> Iterator[OnProgress]:
    columns = TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bars:
        shown: dict[str, Any] = {}

        def report(label: str, done: int, total: int) -> None:
            if label not in shown:
                shown[label] = bars.add_task(label, total=total)
            bars.update(shown[label], completed=done, total=total)

        yield report
