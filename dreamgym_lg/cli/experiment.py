"""The commands of an experiment: `dreamgym demo`, `collect`, `train`, `eval`, `report` and `export`."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from dreamgym_lg.cli.agent import load_object
from dreamgym_lg.cli.console import console, errors_shown, progress_shown, quiet_libraries
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.settings import quick
from dreamgym_lg.experiment.world import World
from dreamgym_lg.experiment.worlds import load_world, open_folder, world_names

WORLD_HELP = (
    f"A world's name ({', '.join(f'[b]{name}[/b]' for name in world_names())}), [b]FILE.py:NAME[/b] of an experiment or a "
    "world of your own, or the folder of an experiment."
)
WorldArgument = Annotated[str, typer.Argument(metavar="WORLD", help=WORLD_HELP)]
Seed = Annotated[int | None, typer.Option(help="Decides the worlds, the models' first weights and every sample. Default: 1.")]
Out = Annotated[
    Path | None, typer.Option(help="Output folder; the same command goes on where it was. Default: runs/WORLD-seedSEED.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A few minutes: see every part work; proves nothing.")]
Iterations = Annotated[int | None, typer.Option(min=1, help="Training iterations. Default: the world's settings.")]
Refresh = Annotated[
    int | None, typer.Option(min=0, help="Real episodes shown to the experience model at each refresh; 0 spends no real step.")
]
DEMO = "peckingorder"


def open_experiment(
    given: str,
    *,
    seed: int | None = None,
    out: Path | None = None,
    quickly: bool = False,
    **settings: Any,
) -> Experiment:
    """The experiment that `given` names: a world's name, `FILE.py:NAME`, or an experiment's folder.

    Raises `ConfigurationError` if it names none of these.
    """
    quiet_libraries()
    chosen = {name: value for name, value in settings.items() if value is not None}
    if (Path(given) / "settings.json").exists():
        return open_folder(Path(given), **chosen)
    found = load_object(given) if ":" in given else load_world(given)
    if isinstance(found, Experiment):
        found.settings = replace(found.settings, **(chosen if seed is None else {**chosen, "seed": seed}))
        found.out = out or found.out
        return found
    if not isinstance(found, World):
        raise ConfigurationError(f"{given} is {type(found).__name__}; give an Experiment, a World, or what creates one")
    seed = 1 if seed is None else seed
    wanted = replace(quick(found.settings) if quickly else found.settings, seed=seed, **chosen)
    name = found.name.rpartition("/")[2]
    return Experiment(found, out or Path("runs") / f"{name}-seed{seed}{'-quick' if quickly else ''}", wanted)


@contextmanager
def _opened(given: str, **options: Any) -> Iterator[Experiment]:
    """The experiment with progress bars over it."""
    with errors_shown():
        work = open_experiment(given, **options)
        with progress_shown() as progress:
            work.progress, work.say = progress, console.print
            yield work


def demo(
    world: WorldArgument = DEMO,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    iterations: Iterations = None,
    refresh: Refresh = None,
) -> None:
    """The closed loop end to end: collect, train in the dream, prove it in the real environment, show it."""
    with _opened(world, seed=seed, out=out, quickly=quick, iterations=iterations, refresh_episodes=refresh) as work:
        _prepare(work)
        work.train_supervised()
        work.train()
        work.prove()
        _show(work)
        _show_episode(work)


def collect(world: WorldArgument, seed: Seed = None, out: Out = None, quick: Quick = False) -> None:
    """Record the world's tasks and real offline trajectories in the replay buffer."""
    with _opened(world, seed=seed, out=out, quickly=quick) as work:
        work.collect()
        buffer = work.replay_buffer
        console.print(f"{buffer.count('trajectories'):,} trajectories, {buffer.count('steps'):,} steps in {work.out}")


def train(
    world: WorldArgument,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    iterations: Iterations = None,
    refresh: Refresh = None,
) -> None:
    """Train experience model and base policy on the collected data, then the policy in the dream."""
    with _opened(world, seed=seed, out=out, quickly=quick, iterations=iterations, refresh_episodes=refresh) as work:
        _prepare(work)
        work.train()
        console.print(f"trained policy: {work.models / 'trained'}", soft_wrap=True)


def evaluate(
    world: WorldArgument,
    seed: Seed = None,
    out: Out = None,
    quick: Quick = False,
    iterations: Iterations = None,
    refresh: Refresh = None,
) -> None:
    """Base against trained policy on held-out tasks of the real environment; writes result.json and the report."""
    with _opened(world, seed=seed, out=out, quickly=quick, iterations=iterations, refresh_episodes=refresh) as work:
        work.train_supervised()
        work.prove()
        _show(work)


def report(world: WorldArgument) -> None:
    """Write report.html and report.png of a finished experiment anew."""
    with _opened(world) as work:
        if not (work.out / "result.json").exists():
            raise ConfigurationError(f"{work.out} has no result.json; run `dreamgym eval {world}` first")
        _show(work)


def export(world: WorldArgument, to: Annotated[Path, typer.Argument(help="Folder to write the trained policy to.")]) -> None:
    """Copy the trained policy, a Hugging Face model folder with its tokenizer and chat template, to a folder of its own."""
    with _opened(world) as work:
        if not (work.models / "trained").exists():
            raise ConfigurationError(f"{work.out} holds no trained policy: run `dreamgym train {world}` first")
        if to.exists():
            raise ConfigurationError(f"{to} exists already; name a folder that does not")
        shutil.copytree(work.models / "trained", to)
        console.print(f"trained policy: {to}", soft_wrap=True)


def _prepare(work: Experiment) -> None:
    work.collect()
    work.train_experience()
    work.train_base()


def _show(work: Experiment) -> None:
    from dreamgym_lg.experiment.evaluation import shown_episodes
    from dreamgym_lg.experiment.report import summary_table, write_report

    result = json.loads((work.out / "result.json").read_text())
    metrics = work.replay_buffer.metrics(work.run_name("train"))
    html, png = write_report(result, metrics, shown_episodes(work), work.out)
    console.print(summary_table(result))
    console.print(f"report: {html}\npicture: {png}\nfigures: {work.out / 'result.json'}", soft_wrap=True)


def _show_episode(work: Experiment) -> None:
    """The trained policy back in the agent graph, with the real environment."""
    console.rule("the trained policy as a chat model in the agent graph, real environment")
    for speaker, text in work.real_episode():
        console.print(f"[bold cyan]{speaker:>12}[/]  {escape(text)}", highlight=False)
