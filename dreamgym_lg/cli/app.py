"""The `dreamgym` command line."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dreamgym_lg.cli.agent import doctor, import_traces
from dreamgym_lg.cli.fidelity import fidelity
from dreamgym_lg.cli.play import play
from dreamgym_lg.errors import DreamGymError

if TYPE_CHECKING:
    from dreamgym_lg.experiment.experiment import Demo

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train a LangGraph agent's policy in a dream, and prove the gain in the real environment.",
)
console = Console()

_DOCTOR = "Examples: [b]dreamgym doctor my_app.py:graph[/b], [b]dreamgym doctor my_app.agents:create_agent --json[/b]"
app.command(epilog=_DOCTOR)(doctor)
app.command("import", epilog="Example: [b]dreamgym import traces.jsonl --to replay.db[/b]")(import_traces)
app.command(epilog="Example: [b]dreamgym fidelity runs/peckingorder-seed1 --without retrieval[/b]")(fidelity)
app.command(epilog="Examples: [b]dreamgym play runs/peckingorder-seed1[/b], the same with [b]--real[/b]")(play)

Game = Annotated[str, typer.Option(help="[b]peckingorder[/b] (read the book, obey it) or [b]twc[/b] (tidy up; harder).")]
Seed = Annotated[int, typer.Option(help="Decides the worlds, the models' first weights and every sample.")]
Out = Annotated[
    Path | None, typer.Option(help="Output folder; the same command goes on where it was. Default: runs/GAME-seedSEED.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Two to three minutes: see every part work; proves nothing.")]
Iterations = Annotated[int | None, typer.Option(min=1, help="GRPO iterations; default: the game's recipe.")]
Refresh = Annotated[
    int | None, typer.Option(min=0, help="Real episodes shown to the experience model at each refresh; 0 spends no real step.")
]


@contextmanager
def _opened(
    game: str, seed: int, out: Path | None, quick: bool, iterations: int | None = None, refresh: int | None = None
) -> Iterator["Demo"]:
    """The output folder with progress bars over it; an error of ours ends the command with its message alone."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two models take turns: a waiting thread must not burn a core
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from dreamgym_lg.experiment.experiment import Demo
    from dreamgym_lg.experiment.settings import settings_for

    given = {"iterations": iterations, "refresh_episodes": refresh}
    try:
        settings = settings_for(game, quick=quick, seed=seed, **{k: v for k, v in given.items() if v is not None})
        folder = out or Path("runs") / f"{game}-seed{seed}{'-quick' if quick else ''}"
        with _progress() as progress:
            yield Demo(folder, settings, progress=progress, say=console.print)
    except DreamGymError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here", style="yellow")
        raise typer.Exit(130) from None


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    columns = TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bars:
        shown: dict[str, Any] = {}
        told: dict[str, int] = {}

        def report(label: str, done: int, total: int) -> None:
            stage = label.split(" (")[0].split(":")[0]
            if stage not in shown:
                shown[stage] = bars.add_task(label, total=total)
            if not console.is_terminal and told.get(stage) != (tenth := 10 * done // total):
                told[stage] = tenth
                console.print(f"{label}: {done}/{total}", highlight=False)  # a log file has no bars
            bars.update(shown[stage], description=label, completed=done, total=total)

        yield report


@app.command(epilog="Example: [b]dreamgym demo --game peckingorder --seed 1[/b]")
def demo(
    game: Game = "peckingorder", seed: Seed = 1, out: Out = None, quick: Quick = False, iterations: Iterations = None,
    refresh: Refresh = None,
) -> None:  # fmt: skip
    """The closed loop end to end: collect, train in the dream, prove it in the real environment, show it."""
    from dreamgym_lg.experiment.evaluation import prove

    with _opened(game, seed, out, quick, iterations, refresh) as work:
        work.collect()
        work.train_models()
        work.train()
        prove(work)
        _show(work)
        _episode(work)


@app.command(epilog="Example: [b]dreamgym collect --game twc --out runs/twc[/b]")
def collect(game: Game = "peckingorder", seed: Seed = 1, out: Out = None, quick: Quick = False) -> None:
    """Record real offline trajectories in the replay buffer."""
    with _opened(game, seed, out, quick) as work:
        work.collect()
        buffer = work.replay_buffer
        console.print(f"{buffer.count('trajectories'):,} trajectories, {buffer.count('steps'):,} steps in {work.out}/replay.db")


@app.command(epilog="Example: [b]dreamgym train --seed 1 --iterations 30[/b]; killed, the same command goes on.")
def train(
    game: Game = "peckingorder", seed: Seed = 1, out: Out = None, quick: Quick = False, iterations: Iterations = None,
    refresh: Refresh = None,
) -> None:  # fmt: skip
    """Train experience model and base policy on the collected data, then the policy in the dream."""
    with _opened(game, seed, out, quick, iterations, refresh) as work:
        work.collect()
        work.train_models()
        work.train()
        console.print(f"trained policy: {work.out}/models/trained")


@app.command("eval", epilog="Example: [b]dreamgym eval --seed 1[/b]")
def evaluate(
    game: Game = "peckingorder", seed: Seed = 1, out: Out = None, quick: Quick = False, iterations: Iterations = None,
    refresh: Refresh = None,
) -> None:  # fmt: skip
    """Base against trained policy on held-out worlds of the real environment; writes result.json."""
    from dreamgym_lg.experiment.evaluation import prove

    with _opened(game, seed, out, quick, iterations, refresh) as work:
        prove(work)
        _show(work)


@app.command(epilog="Example: [b]dreamgym report runs/peckingorder-seed1[/b]")
def report(out: Annotated[Path, typer.Argument(help="The output folder of a finished run.")]) -> None:
    """Write report.html and report.png of a finished run anew."""
    from dreamgym_lg.experiment.experiment import Demo
    from dreamgym_lg.experiment.settings import Settings

    try:
        if not (out / "result.json").exists():
            raise DreamGymError(f"{out} has no result.json; run `dreamgym eval --out {out}` first")
        _show(Demo(out, Settings(**json.loads((out / "settings.json").read_text()))))
    except DreamGymError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _show(work: "Demo") -> None:
    from dreamgym_lg.experiment.evaluation import shown_episodes
    from dreamgym_lg.experiment.report import summary_table, write_report

    result = json.loads((work.out / "result.json").read_text())
    html, png = write_report(result, work.replay_buffer.metrics("train"), shown_episodes(work), work.out)
    console.print(summary_table(result))
    console.print(f"report: {html}\npicture: {png}\nfigures: {work.out / 'result.json'}", soft_wrap=True)


def _episode(work: "Demo") -> None:
    """The exported policy back in the agent graph, with the real environment."""
    console.rule("the trained policy as a chat model in the agent graph, real environment")
    for speaker, text in work.real_episode():
        console.print(f"[bold cyan]{speaker:>12}[/]  {text}", highlight=False)


if __name__ == "__main__":
    sys.exit(app())
