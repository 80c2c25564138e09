"""`dreamgym compare`: two versions of an agent in the same dream."""

from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.table import Table

from dreamgym_lg.cli.agent import AGENT_HELP, Isolated, PassThrough, SimulateNode, Writes
from dreamgym_lg.cli.console import console, errors_shown, say
from dreamgym_lg.cli.play import own_policy
from dreamgym_lg.compiled.responder import Compiled
from dreamgym_lg.dream import Dream, Recorded, References, Schemas, TraceIndex, usual_dream
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.comparison import Comparison, Version, play_version
from dreamgym_lg.experiment.experience_models import load_experience_model
from dreamgym_lg.hosted import EXAMPLE_MODEL
from dreamgym_lg.progress import counter, show_progress
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Task

Before = Annotated[str, typer.Argument(metavar="AGENT", help=AGENT_HELP)]
After = Annotated[str, typer.Argument(metavar="NEW_AGENT", help="The same of the changed version.")]
Traces = Annotated[Path, typer.Option("--replay-buffer", help="Real traces, whose tasks are played.", exists=True)]
Experience = Annotated[str | None, typer.Option(help=f"Answers where traces do not, and judges, e.g. {EXAMPLE_MODEL}.")]
World = Annotated[Path | None, typer.Option(help="A world of `dreamgym compile`, which answers before the experience model.")]
Policy = Annotated[str | None, typer.Option(help=f"Acts in both, e.g. {EXAMPLE_MODEL}. Default: each agent's own model.")]
Tasks = Annotated[int, typer.Option(min=10, help="Recorded tasks, drawn by --seed.")]
Episodes = Annotated[int, typer.Option(min=1, help="Of each task and version.")]
FailBelow = Annotated[
    float | None, typer.Option(help="Exit with 1 where the difference lies below this for certain, e.g. -0.02; for CI.")
]


def compare(
    agent: Before,
    new_agent: After,
    replay_buffer: Traces,
    experience_model: Experience = None,
    world: World = None,
    policy: Policy = None,
    tasks: Tasks = 200,
    episodes: Episodes = 4,
    seed: Annotated[int, typer.Option(help="Decides tasks and samples.")] = 0,
    fail_below: FailBelow = None,
    isolation: Isolated = None,
    pass_through: PassThrough = None,
    simulate_node: SimulateNode = None,
    writes: Writes = None,
) -> None:
    """Compare two versions of an agent in the same dream, with an interval.

    No tool runs. Each task is played in the same worlds by both, so that a difference is the change's. The interval is one of
    98 %: without a difference, one comparison in fifty claims one.
    """
    options: dict[str, Any] = {
        "isolation": isolation,
        "writes": writes or None,
        "pass_through": pass_through or (),
        "simulate_nodes": simulate_node or (),
    }
    with errors_shown(), ReplayBuffer(replay_buffer) as buffer, ExitStack() as stack:
        compiled = Compiled(world) if world is not None else None
        if compiled is not None:
            stack.callback(compiled.close)
        worlds = [AgentWorld(name, **options) for name in (agent, new_agent)]
        dreams = [_dream(own.index(buffer), buffer, experience_model, compiled) for own in worlds]
        chosen, versions = _tasks(buffer, dreams[0], tasks, seed, judged=experience_model is not None), list[Version]()
        for name, own, dream in zip((agent, new_agent), worlds, dreams, strict=True):
            playing = play_version(
                name,
                own.agent(own_policy(policy, own.graph), real=False),
                [own.with_tools(task) for task in chosen],
                dream.create_environment,
                num_generations=episodes,
                seed=seed,
                on_episode=counter(show_progress, name, len(chosen) * episodes),
            )
            versions.append(run_lasting(playing))
        comparison = Comparison(before=versions[0], after=versions[1])
    _show(comparison)
    if fail_below is not None and comparison.interval[1] < fail_below:
        raise typer.Exit(1)


def _dream(index: TraceIndex, buffer: ReplayBuffer, model: str | None, compiled: Compiled | None) -> Dream:
    """The dream of both versions: schemas, recorded answers, the compiled world and the experience model."""
    if model is None and compiled is None:
        raise ConfigurationError("nothing answers what the traces do not: give --experience-model or --world")
    middle = [compiled] if compiled is not None else []
    if model is None:
        return Dream([Schemas(index.tools), Recorded(index), *middle], judges=[References(index)])
    usual = usual_dream(load_experience_model(model, buffer), index)
    *before, last = usual.responders
    return Dream([*before, *middle, last], judges=usual.judges, version=usual.version)


def _tasks(buffer: ReplayBuffer, dream: Dream, number: int, seed: int, *, judged: bool) -> list[Task]:
    """Draw recorded tasks; without a model that judges, only those that recorded successes decide."""
    stored = buffer.tasks(origin="real")
    decided = stored if judged else [task for task in stored if dream.decides_by_traces(task)]
    if len(decided) < len(stored):
        say(f"{len(decided)} of {len(stored)} recorded tasks are decided by recorded successes; --experience-model judges all")
    return Random(seed).sample(decided, min(number, len(decided)))


def _show(comparison: Comparison) -> None:
    table = Table("agent", "success", "actions", "seconds", "tokens", title="in the same dream", title_justify="left")
    for each in (comparison.before, comparison.after):
        tokens = f"{each.tokens:,}" if each.tokens else "not reported"
        table.add_row(each.name, str(each.success), f"{each.actions:.1f}", f"{each.seconds:.2f}", tokens)
    console.print(table)
    low = comparison.interval[0]
    say(str(comparison), "bold" if not comparison.differs else "bold green" if low > 0 else "bold red")
