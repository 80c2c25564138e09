"""The commands for the user's own agent: `dreamgym doctor` and `dreamgym import`."""

import asyncio
import json
import sqlite3
import sys
import warnings
from collections.abc import Sequence
from contextlib import closing, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dreamgym_lg.cli.console import chosen, console, errors_shown, say
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.wall.wall import Isolation
from dreamgym_lg.traces.checkpoints import is_sqlite

if TYPE_CHECKING:
    from dreamgym_lg.simulate.doctor import Examination, Part
    from dreamgym_lg.traces import Rejected

AGENT_HELP = "FILE.py:NAME or package.module:NAME of a graph, of an object with invoke, or of a function that creates one."
ISOLATION_HELP = "What keeps it from the real world: process, a wall of the kernel, or guard. Default: process where possible."
SOURCE_HELP = "Conversations, LangSmith or Langfuse runs or OpenTelemetry spans as JSON (Lines), or a SqliteSaver's file."
HELD_OUT_HELP = "Share of the tasks to keep for evaluation, one at least: never trained on, never retrieved."
REWARDS_HELP = "JSON object of rewards: by the thread of a SqliteSaver's file, a LangSmith or OpenTelemetry trace, a row's id."

Agent = Annotated[str, typer.Argument(metavar="AGENT", help=AGENT_HELP)]
PassThrough = Annotated[list[str] | None, typer.Option(help="A tool that really runs; may be repeated.")]
SimulateNode = Annotated[list[str] | None, typer.Option(help="A node of plain code that the dream plays; may be repeated.")]
Writes = Annotated[
    list[str] | None,
    typer.Option(help="A tool that changes something; may be repeated. Default: all but those marked as reading."),
]
Traces = Annotated[
    Path | None, typer.Option("--replay-buffer", help="Real traces, which show which tools write.", exists=True, dir_okay=False)
]
Isolated = Annotated[Isolation | None, typer.Option(help=ISOLATION_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the parts as JSON.")]

Source = Annotated[Path, typer.Argument(metavar="TRACES", help=SOURCE_HELP)]
To = Annotated[Path, typer.Option(help="The replay buffer: a SQLite file, made if it is not there.")]
Format = Annotated[str, typer.Option(help="[b]auto[/b], [b]messages[/b], [b]langsmith[/b] or [b]otel[/b].")]
Environment = Annotated[str, typer.Option(help="The name under which the tasks of these traces are stored.")]
HeldOut = Annotated[float, typer.Option(min=0, max=1, help=HELD_OUT_HELP)]
Rewards = Annotated[Path | None, typer.Option(help=REWARDS_HELP, exists=True, dir_okay=False)]
RewardRange = Annotated[
    tuple[float, float], typer.Option(metavar="LOWEST HIGHEST", help="Of the recorded rewards; scaled to 0 to 1.")
]
RewardKey = Annotated[str | None, typer.Option(metavar="KEY", help="The feedback that is the reward, of several.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if a row was rejected; the rest is stored all the same.")]

COLOURS = {"could leak": "bold red", "not simulated": "bold red", "stopped": "red", "raised": "yellow", "simulated": "green"}


def doctor(
    agent: Agent,
    pass_through: PassThrough = None,
    simulate_node: SimulateNode = None,
    writes: Writes = None,
    replay_buffer: Traces = None,
    isolation: Isolated = None,
    as_json: AsJson = False,
) -> None:
    """Show how a dream handles each part of an agent, and how to mend it.

    It also says which tools count as writing: a dreamed success needs the writing calls of a recorded one. One episode is tried
    with a stub policy, behind the wall where there is one: what is stopped there is shown with its line.

    Exit code 0: it can be dreamed; 1: something is stopped, could leak or is not simulated; 2: it could not be loaded.
    """
    with errors_shown():
        from dreamgym_lg.production.prompts import components
        from dreamgym_lg.replay.buffer import ReplayBuffer
        from dreamgym_lg.simulate.doctor import examine
        from dreamgym_lg.simulate.wall.wall import limits_of_wall, missing_for_wall, promises_of

        missing = missing_for_wall()
        isolation = isolation or ("guard" if missing else "process")
        names = chosen(pass_through=pass_through, simulate_nodes=simulate_node)
        with redirect_stdout(sys.stderr):  # the agent's module may print, too
            graph, trial_parts, prompts = _try(agent, isolation, names)
        with ReplayBuffer(replay_buffer or ":memory:") as buffer:
            examination = examine(
                graph,
                **names,
                writes=writes,
                trajectories=buffer.trajectories(source="offline", split="train", errors=False),
                isolation=isolation,
            )
        examination = replace(examination, parts=[*examination.parts, *trial_parts])
        texts = components(prompts, examination.tools)
    if as_json:
        parts = [part._asdict() for part in examination.parts]
        support = {"process": not missing, "missing": missing, "limits": [] if missing else limits_of_wall()}
        result = {"agent": agent, "ready": not examination.problems, "isolation": support, "parts": parts, "components": texts}
        print(json.dumps(result, indent=2))
    else:
        _show(agent, examination)
        say("What a prompt learner would change (--json has the texts):")
        for name, text in texts.items():
            say(f"    {name}: {len(text)} characters")  # the text itself may be confidential
        lacks = f"no wall of the kernel, which needs {'; and '.join(missing)}. " if missing else ""
        say(f"Isolation: {lacks}{promises_of(isolation)}")
    if examination.problems:
        raise typer.Exit(1)


def _try(agent: str, isolation: Isolation, names: dict[str, Any]) -> tuple[Any, "list[Part]", dict[str, str]]:
    """Load the agent, behind the wall first if possible, and play a trial episode.

    Returns the graph, the trial's findings and the system prompts.
    """
    from dreamgym_lg.simulate import SimulatedAgent
    from dreamgym_lg.simulate.doctor import Part, examine
    from dreamgym_lg.simulate.episode import input_hint, required_context
    from dreamgym_lg.simulate.trial import TrialPolicy, try_out
    from dreamgym_lg.simulate.wall.agent import WalledAgent, Workers
    from dreamgym_lg.user_code import load_agent

    workers = Workers(agent, count=1, **names) if isolation == "process" else None
    if workers is not None:
        workers.check()
    graph: Any = load_agent(agent)
    if missing := required_context(graph):
        advice = f"an episode needs context= with {', '.join(missing)}, so that none was tried"
        return graph, [Part("code", "the tried episode", "raised", advice)], {}
    if workers is None and any(part.handling == "could leak" for part in examine(graph, **names).parts):
        return graph, [], {}  # the trial would have these side effects
    policy = TrialPolicy()
    trial = try_out(WalledAgent(workers, policy) if workers else SimulatedAgent(graph, policy, **names))
    parts, prompts = asyncio.run(trial)
    if hint := input_hint(graph):
        parts = [part._replace(advice=f"{part.advice}; {hint}") if part.handling == "raised" else part for part in parts]
    return graph, parts, prompts


def _show(agent: str, examination: "Examination") -> None:
    table = Table(title=escape(agent), title_justify="left")
    for column in ("part", "name", "in the dream", "reads or writes", "what to do"):
        table.add_column(column, overflow="fold")
    last = ""
    for part in examination.parts:
        kind, last = part.kind if part.kind != last else "", part.kind
        handling = Text(part.handling, COLOURS.get(part.handling, ""))
        table.add_row(kind, escape(part.name), handling, escape(part.use), escape(part.advice))
    console.print(table)
    if examination.writes_line:
        say(examination.writes_line)
    if examination.problems:
        names = ", ".join(dict.fromkeys(part.name for part in examination.problems))
        say(f"No episode that reaches it can be right: {names}", "bold")
    else:
        say("A tried episode touched nothing real. Code that it did not reach is stopped by what the last line names.")


def import_traces(
    traces: Source,
    to: To,
    format: Format = "auto",
    environment: Environment = "traces",
    held_out: HeldOut = 0.0,
    rewards: Rewards = None,
    reward_range: RewardRange = (0, 1),
    reward_key: RewardKey = None,
    strict: Strict = False,
) -> None:
    """Read existing traces into a replay buffer, where they ground the dream. Importing the same file twice stores it once."""
    from dreamgym_lg.replay.buffer import ReplayBuffer
    from dreamgym_lg.traces import lacking_rewards, load_traces

    with errors_shown(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the rejected rows are shown below
        loaded = load_traces(
            traces,
            format=format,  # type: ignore[arg-type]  # another one is refused
            environment=environment,
            held_out=held_out,
            reward=_rewards(rewards) if rewards is not None else None,
            reward_range=reward_range,
            reward_key=reward_key,
        )
        read = list(loaded)
        with ReplayBuffer(to) as buffer:
            before, added = buffer.corrections(), buffer.extend(read)
            updated = buffer.corrections() - before
            totals = f"{buffer.count('trajectories'):,} trajectories, {buffer.count('steps'):,} steps"
            held = sum(task.split != "train" for task in buffer.tasks())  # a task stored before keeps its split
    successes, steps = sum(each.success for each in read), sum(len(each.steps) for each in read)
    corrected = f", {updated:,} updated with another outcome" if updated else ""
    say(
        f"{len(read):,} traces read ({successes:,} successes, {steps:,} steps, {len({t.task.id for t in read}):,} tasks); "
        f"{added:,} new{corrected} in {to}, which now holds {totals}; {held:,} of its tasks are kept for evaluation"
    )
    say_folded(loaded.folded)
    if lack := lacking_rewards(len(read), successes, sum(each.has_outcome for each in read)):
        say(lack, "bold")
    say_rejected(loaded.rejected)
    if loaded.rejected and strict:
        raise typer.Exit(1)


def say_folded(number: int) -> None:
    """Say how many traces were left out for longer or later ones."""
    if number:
        say(f"{number:,} left out: longer traces begin with them, or later rows correct them")


def say_rejected(rejected: "Sequence[Rejected]", most: int = 20) -> None:
    """Report the number of rejected rows and the first `most` reasons, if any."""
    if rejected:
        say("\n    ".join([f"{len(rejected):,} rejected", *(f"line {each.line}: {each.reason}" for each in rejected[:most])]))


def is_replay_buffer(path: Path) -> bool:
    """True for a replay buffer's file, unlike other SQLite files such as a `SqliteSaver`'s."""
    if not path.is_file() or not is_sqlite(path):
        return False
    from dreamgym_lg.replay.schema import APPLICATION_ID

    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)


def _rewards(file: Path) -> dict[str, float]:
    try:
        return dict(json.loads(file.read_text()).items())
    except (ValueError, AttributeError) as error:
        raise ConfigurationError(f"{file} is no JSON object ({error}); give an object of ids and rewards") from error
