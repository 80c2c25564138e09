"""`dreamgym compare`: two versions of an agent in the same dream."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dreamgym_lg.cli.agent import AGENT_HELP, Isolated, PassThrough, SimulateNode, Writes
from dreamgym_lg.cli.console import chosen, console, errors_shown, say
from dreamgym_lg.experiment.comparison import Comparison, SharedDream
from dreamgym_lg.hosted import EXAMPLE_MODEL
from dreamgym_lg.progress import show_progress
from dreamgym_lg.replay.buffer import ReplayBuffer

Before = Annotated[str, typer.Argument(metavar="AGENT", help=AGENT_HELP)]
After = Annotated[str, typer.Argument(metavar="NEW_AGENT", help="The same of the changed version.")]
Traces = Annotated[Path, typer.Option("--replay-buffer", help="Real traces, whose tasks are played.", exists=True)]
Experience = Annotated[str | None, typer.Option(help=f"Answers where traces do not, and judges, e.g. {EXAMPLE_MODEL}.")]
World = Annotated[Path | None, typer.Option(help="A world of `dreamgym compile`, which answers before the experience model.")]
Policy = Annotated[str | None, typer.Option(help=f"Acts in both, e.g. {EXAMPLE_MODEL}. Default: each agent's own model.")]
Tasks = Annotated[int, typer.Option(min=10, help="Recorded tasks, drawn by --seed.")]
Episodes = Annotated[int, typer.Option(min=1, help="Of each task and version.")]
PRICES_HELP = "Dollars for a million tokens that the agent's model reads and writes, to say what an episode costs."
Prices = Annotated[tuple[float, float] | None, typer.Option(metavar="READ WRITTEN", help=PRICES_HELP)]
FAIL_HELP = (
    "Exit with 1 only where the whole interval of the difference lies below this, e.g. -0.02: a loss that chance explains does "
    "not fail. Less than a certain loss passes, and the last line says what could have been seen."
)
FailBelow = Annotated[float | None, typer.Option(min=-1, max=1, help=FAIL_HELP)]


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
    prices: Prices = None,
    fail_below: FailBelow = None,
    isolation: Isolated = None,
    pass_through: PassThrough = None,
    simulate_node: SimulateNode = None,
    writes: Writes = None,
) -> None:
    """Compare the success of two versions of an agent in the same dream.

    No tool runs. Both play the same tasks in the same worlds; the difference is paired by task, with its 98 % interval: one in
    fifty comparisons of equal versions claims a difference. Exit code 0, or 1 by --fail-below; 2: nothing was compared.
    """
    with errors_shown(), ReplayBuffer(replay_buffer) as buffer:
        shared = SharedDream(
            buffer,
            experience_model=experience_model,
            world=world,
            policy=policy,
            tasks=tasks,
            episodes=episodes,
            seed=seed,
            on_progress=show_progress,
            **chosen(isolation=isolation, writes=writes, pass_through=pass_through, simulate_nodes=simulate_node),
        )
        comparison = shared.compare(agent, new_agent)
    _show(comparison, prices)
    if fail_below is not None and comparison.interval[1] < fail_below:
        say(f"failed: the loss is certainly beyond {fail_below:+.3f}", "bold red")
        raise typer.Exit(1)


def _show(comparison: Comparison, prices: tuple[float, float] | None) -> None:
    columns = ("agent", "success", "unanswered", "actions", "model calls", "their seconds", "tokens read", "written")
    table = Table(*columns, title="in the same dream; means of an episode", title_justify="left")
    for each in (comparison.before, comparison.after):
        tokens = (f"{count:,.0f}" if each.input_tokens else "not reported" for count in (each.input_tokens, each.output_tokens))
        figures = (f"{each.unanswered:.0%}", f"{each.actions:.1f}", f"{each.calls:.1f}", f"{each.seconds:.2f}")
        table.add_row(each.name, str(each.success), *figures, *tokens)
    console.print(table)
    if prices:
        costs = (
            prices[0] * each.input_tokens + prices[1] * each.output_tokens for each in (comparison.before, comparison.after)
        )
        say("an episode costs {:.5f} dollars before and {:.5f} after".format(*(cost / 1e6 for cost in costs)))
    say(str(comparison), "bold" if not comparison.differs else "bold green" if comparison.interval[0] > 0 else "bold red")
    if left_out := comparison.left_out:
        say(f"{left_out} further tasks are left out: no episode of a version was answered to its end", "yellow")
    say(f"four in five such comparisons would show a difference of {comparison.detectable:.3f}")
