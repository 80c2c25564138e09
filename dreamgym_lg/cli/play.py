"""`dreamgym play`: a person acts in the dream or in the real environment, or answers the tool calls of an agent."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dreamgym_lg.actions import render_answer
from dreamgym_lg.cli.agent import PassThrough, SimulateNode
from dreamgym_lg.cli.console import errors_shown, say, typed
from dreamgym_lg.cli.dreams import ModelName, Source, opened
from dreamgym_lg.cli.experiment import WORLD_HELP, is_object
from dreamgym_lg.cli.play_agent import play_agent
from dreamgym_lg.cli.play_session import Session, store_played, stored_task, typed_call
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.world import World
from dreamgym_lg.gym import DreamGym
from dreamgym_lg.hosted.chat_model import EXAMPLE_MODEL
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.simulate.loading import compiled, load_object
from dreamgym_lg.simulate.wall.wall import Isolation
from dreamgym_lg.tasks import is_tool_task, schemas
from dreamgym_lg.types import DECIDERS, Split, Task

COMMANDS = ("why", "undo", "reset", "next", "task", "tools", "answer", "help", "quit")

WORLD_OR_AGENT = f"{WORLD_HELP} Or [b]FILE.py:NAME[/b] of an agent's graph, whose world you are."
BUFFER_HELP = "In place of an experiment: your own replay buffer. Of an agent: holds the --task, takes what you --record."
POLICY_HELP = f"Of an agent: the chat model that acts, e.g. {EXAMPLE_MODEL}, or its folder. Default: its own models."
ISOLATION_HELP = "Of an agent: what keeps it from the real world. Default: process, a wall of the kernel."
REAL_HELP = "The real environment answers, in place of the dream (an experiment's only)."
SPLIT_HELP = "Whose tasks are played. Default: test; of a replay buffer, any."


def play(
    world: Annotated[str | None, typer.Argument(metavar="WORLD", help=WORLD_OR_AGENT)] = None,
    replay_buffer: Annotated[Path | None, typer.Option(help=BUFFER_HELP, dir_okay=False)] = None,
    experience_model: ModelName = None,
    real: Annotated[bool, typer.Option("--real", help=REAL_HELP)] = False,
    split: Annotated[Split | None, typer.Option(help=SPLIT_HELP)] = None,
    task: Annotated[str | None, typer.Option(help="The id of the task to begin with.")] = None,
    reasoning: Annotated[bool, typer.Option("--reasoning", help="Show /why after every answer.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Store what was played in the buffer, as run 'play'.")] = False,
    policy: Annotated[str | None, typer.Option(help=POLICY_HELP)] = None,
    isolation: Annotated[Isolation | None, typer.Option(help=ISOLATION_HELP)] = None,
    pass_through: PassThrough = None,
    simulate_node: SimulateNode = None,
) -> None:
    """Act yourself, in the dream or in the real environment; or be the world of your own agent. /help inside says how.

    The dream is that of an experiment's newest experience model, or of the one that you name, on the tasks of a replay buffer.

    Of an agent's graph the agent acts, behind the wall as in DreamGym("FILE.py:NAME"), and you answer its tool calls: none of
    its tools runs. You type its instruction, or name a --task of a --replay-buffer; --record stores the episode there. At its
    end all that happened is shown, with the lines of the agent's code: simulated calls, tools that really ran, and what was
    stopped.
    """
    with errors_shown():
        loaded = load_object(world) if world is not None and is_object(world) else None
        of_agents = {"policy": policy, "isolation": isolation, "pass_through": pass_through, "simulate_node": simulate_node}
        of_worlds = {"experience_model": experience_model, "real": real, "split": split, "reasoning": reasoning}
        if world is not None and not isinstance(loaded, DreamGym | Experiment | World | None):
            _refuse(of_worlds, f"with {world}: you are the world of this agent")
            options = {"isolation": isolation, "pass_through": pass_through or (), "simulate_nodes": simulate_node or ()}
            play_agent(world, compiled(loaded), policy, buffer=replay_buffer, task=task, record=record, **options)
            return
        _refuse(of_agents, "is for an agent's graph, FILE.py:NAME; in a world you act")
        with opened(world, replay_buffer, experience_model, loaded) as source, _environment(source, real) as played:
            Player(played, _tasks(source, task, split), reasoning=reasoning, record=record).run()


def _refuse(options: Mapping[str, object], reason: str) -> None:
    for name, value in options.items():
        if value:
            raise ConfigurationError(f"--{name.replace('_', '-')} {reason}; leave it away")


class PlayedEnvironment(NamedTuple):
    """An environment for a person."""

    environment: Environment
    described: str
    replay_buffer: ReplayBuffer
    max_steps: int | None
    dream: str = ""
    """The dream's version; "" for the real environment."""


@contextmanager
def _environment(source: Source, real: bool) -> Iterator[PlayedEnvironment]:
    max_steps = source.work.world.max_steps if source.work else None
    if not real:
        dream = source.dream()
        parts = ", ".join(DECIDERS.get(part.name, part.name) for part in dream.responders)
        described = f"the dream {dream.version}, answered by {parts}"
        yield PlayedEnvironment(dream.create_environment(), described, source.buffer, max_steps, dream.version)
    elif source.work is None:
        raise ConfigurationError("--real needs a WORLD: a replay buffer does not hold the tools themselves")
    else:
        with closing(source.work.world.create_environment()) as environment:
            yield PlayedEnvironment(environment, "the real environment", source.buffer, max_steps)


def _tasks(source: Source, task_id: str | None, split: Split | None) -> list[Task]:
    """The tasks to play, the named one first. Raises `ConfigurationError` if there is none."""
    tasks = [stored_task(source.buffer, task_id)] if task_id else []
    known = source.work.tasks(split or "test") if source.work else source.buffer.tasks(split=split, origin="real")
    tasks += [task for task in known if task.id != task_id]
    if not tasks:
        raise ConfigurationError(f"there is no task of the split {split or 'test'!r}: choose another --split")
    return tasks


class Player:
    """The terminal around a session. Raises what the first task's start raises; later errors are shown."""

    def __init__(self, played: PlayedEnvironment, tasks: list[Task], *, reasoning: bool, record: bool) -> None:
        self.played, self.tasks, self.reasoning, self.record = played, tasks, reasoning, record
        self.number = 0
        self.session = Session(played.environment, tasks[0], played.max_steps)

    def run(self) -> None:
        """Until /quit or the end of the input. What was played is recorded when it is left, also by Ctrl-C."""
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and the arrow keys in input())
        say(f"You act in {self.played.described}. /help says how.")
        self.task()
        try:
            while (line := typed("> ")) is not None and line != "/quit":
                try:
                    self.obey(line)
                except DreamGymError as error:
                    say(str(error), "yellow")
        finally:
            self.leave()

    def obey(self, line: str) -> None:
        """Carry out a person's line: a command or an action."""
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            if name not in COMMANDS or name == "quit":
                raise ConfigurationError.unknown("command", line.split()[0], [f"/{each}" for each in COMMANDS])
            getattr(self, name)(*([rest.strip()] if name == "answer" else []))
        elif line:
            self._act(typed_call(line, schemas(self.session.task)) if is_tool_task(self.session.task) else line)

    def _act(self, action: str) -> None:
        self.session.act(action)
        self._show_answer()

    def _show_answer(self) -> None:
        """Print the newest observation, as the policy sees it, and the outcome at the end."""
        session = self.session
        if not session.steps:
            say(session.first)
            return
        last = session.steps[-1]
        say(last.next_observation or "(nothing)")
        if not last.valid:
            say("invalid", "yellow")
        if self.reasoning:
            self.why()
        if session.over:
            outcome = "success" if session.success else "failure" if last.terminated else "cut short by the step limit"
            reward = sum(step.reward for step in session.steps)
            style = "bold green" if session.success else "bold red"
            say(f"{outcome}: reward {reward:g} in {len(session.steps)} actions", style)

    def leave(self) -> None:
        """Record what was played, with --record, if anything was."""
        if self.record and self.session.steps:
            store_played(self.played.replay_buffer, self.session.trajectory(self.played.dream))

    # --- the commands, each with its help ---------------------------------------------------------------------------------

    def why(self) -> None:
        """Show the reasoning, the verdict and the reward of the last answer."""
        if not self.session.steps:
            raise ConfigurationError("there is no answer yet: act first")
        last = self.session.steps[-1]
        verdict = f"{'valid' if last.valid else 'invalid'}, reward {last.reward:g}"
        for how, name in (("decided", last.decided_by), ("judged", last.judged_by)):
            verdict += f", {how} by {DECIDERS.get(name, name)}" if name else ""
        say(f"{last.reasoning or '(the real environment gives no reasons)'}\n{verdict}", "dim")

    def undo(self) -> None:
        """Take the last action back; those before it are played again."""
        self.session.undo()
        self._show_answer()

    def reset(self) -> None:
        """Begin the task anew."""
        self.leave()
        self.session.begin()
        self._show_answer()

    def next(self) -> None:
        """Go on to another task."""
        self.leave()
        self.number = (self.number + 1) % len(self.tasks)
        self.session = Session(self.played.environment, self.tasks[self.number], self.played.max_steps)
        self.task()

    def task(self) -> None:
        """Show the task again."""
        task = self.session.task
        say(f"task {task.id} ({task.environment}, {task.split})", "dim")
        say(task.instruction, "bold cyan")
        self._show_answer()

    def tools(self) -> None:
        """Show what can be called (tool agents)."""
        if not (functions := schemas(self.session.task)):
            how = "/answer alone ends it" if is_tool_task(self.session.task) else "type the action as text"
            raise ConfigurationError(f"this task has no tools: {how}")
        for function in functions:
            parameters = function.get("parameters")
            schema = json.dumps(parameters, ensure_ascii=False) if parameters else "(its schema is not known)"
            say(function["name"], "bold")
            say("\n".join(filter(None, (function.get("description"), schema))), "dim")

    def answer(self, text: str) -> None:
        """Give the final answer, which ends the episode: /answer TEXT (tool agents)."""
        if not is_tool_task(self.session.task):
            raise ConfigurationError("this task has no tools, so no final answer ends it: type the action as text")
        if not text:
            raise ConfigurationError("/answer needs a text: /answer The flight is booked.")
        self._act(render_answer(text))

    def help(self) -> None:
        """Show these lines."""
        how = "NAME KEY=VALUE ..., or JSON" if is_tool_task(self.session.task) else "any text"
        say("\n".join([f"an action: {how}", *(f"/{name:<7} {getattr(self, name).__doc__}" for name in COMMANDS)]), "dim")

    def quit(self) -> None:
        """Leave, as does the end of the input."""
