"""`dreamgym play`: a person acts in an environment, or answers the calls of an agent."""

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym_lg.actions import ToolCall, parse_action, render_answer, render_call
from dreamgym_lg.cli.agent import PassThrough, SimulateNode
from dreamgym_lg.cli.console import errors_shown, say, typed
from dreamgym_lg.cli.dreams import ModelName, Source, opened
from dreamgym_lg.cli.experiment import WORLD_HELP, is_object
from dreamgym_lg.cli.play_agent import play_agent, store_played, stored_task
from dreamgym_lg.dream import Dream
from dreamgym_lg.environment import Environment, play_action
from dreamgym_lg.errors import ConfigurationError, DreamGymError, EnvironmentFailed
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.world import World
from dreamgym_lg.gym import DreamGym
from dreamgym_lg.hosted.chat_model import EXAMPLE_MODEL
from dreamgym_lg.simulate.user_code import compiled, load_object
from dreamgym_lg.simulate.wall.wall import Isolation
from dreamgym_lg.tasks import is_tool_task, schemas
from dreamgym_lg.types import DECIDERS, Split, Step, Task, Trajectory

COMMANDS = ("/why", "/next", "/help", "/quit", "/tools", "/answer")
HELP_TEXT = """an action: any text
/why    Show the reasoning, the verdict and the reward of the last answer.
/next   Go on to another task.
/help   Show these lines.
/quit   Leave, as does the end of the input."""
HELP_CALLS = (
    HELP_TEXT.replace("any text", "NAME KEY=VALUE ..., or JSON")
    + """
/tools  Show what can be called.
/answer Give the final answer, which ends the episode: /answer TEXT"""
)

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
    """Act yourself, dreamed or for real, or be the world of your own agent. /help inside says how.

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
        with opened(world, replay_buffer, experience_model, loaded) as source:
            if real and source.work is None:
                raise ConfigurationError("--real needs a WORLD: a replay buffer does not hold the tools themselves")
            _play_tasks(source, None if real else source.dream(), _tasks(source, task, split), reasoning, record)


def _refuse(options: Mapping[str, object], reason: str) -> None:
    for name, value in options.items():
        if value:
            raise ConfigurationError(f"--{name.replace('_', '-')} {reason}; leave it away")


def _tasks(source: Source, task_id: str | None, split: Split | None) -> list[Task]:
    """The tasks to play, the named one first. Raises `ConfigurationError` if there is none."""
    tasks = [stored_task(source.buffer, task_id)] if task_id else []
    stored = source.work.tasks(split or "test") if source.work else source.buffer.tasks(split=split, origin="real")
    tasks += [task for task in stored if task.id != task_id]
    if not tasks:
        raise ConfigurationError(f"there is no task of the split {split or 'test'!r}: choose another --split")
    return tasks


class Session:
    """One episode of a person, stepped and cut short like a policy's."""

    def __init__(self, environment: Environment, task: Task, max_steps: int | None = None) -> None:
        self.environment, self.task, self.max_steps = environment, task, max_steps
        self.steps: list[Step] = []
        self.success, self.error = False, None  # type: bool, str | None
        self.first = environment.reset(task)

    @property
    def over(self) -> bool:
        return self.error is not None or bool(self.steps and (self.steps[-1].terminated or self.steps[-1].truncated))

    def act(self, action: str) -> Step:
        """Play one action; an error of the experience model leaves the session where it was."""
        if self.over:
            raise ConfigurationError("the episode is over: /next or /quit")
        observation = self.steps[-1].next_observation if self.steps else self.first
        try:
            played = play_action(self.environment, action, observation, last=len(self.steps) + 1 == self.max_steps)
        except EnvironmentFailed as error:
            self.error = f"{type(error).__name__}: {error}"
            raise
        self.steps.append(played.step)
        self.success = played.success
        return played.step


def _play_tasks(source: Source, dream: Dream | None, tasks: Sequence[Task], reasoning: bool, record: bool) -> None:
    """Play the tasks until the person leaves. What was played is recorded when it is left, also by Ctrl-C."""
    world = source.work.world if source.work else None
    with closing(dream.create_environment() if dream else world.create_environment()) as environment:  # type: ignore[union-attr]
        parts = ", ".join(DECIDERS.get(part.name, part.name) for part in dream.responders) if dream else ""
        where = f"the dream {dream.version}, answered by {parts}" if dream else "the real environment"
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and the arrow keys in input())
        say(f"You act in {where}. /help says how.")
        for task in tasks:
            session = Session(environment, task, world.max_steps if world else None)
            try:
                if not _play_task(session, reasoning):
                    return
            finally:
                if record and session.steps:
                    store_played(source.buffer, _trajectory(session, dream.version if dream else ""))


def _trajectory(session: Session, dream: str) -> Trajectory:
    """The episode so far; one that was left is truncated. A dreamed one is `synthetic`: no dream is grounded in it."""
    *steps, last = session.steps
    return Trajectory(
        task=session.task,
        steps=[*steps, replace(last, truncated=not last.terminated)],
        success=session.success,
        source="synthetic" if dream else "real",
        error=session.error,
        experience_version=dream,
    )


def _play_task(session: Session, reasoning: bool) -> bool:
    """Carry out the person's lines; False where the person leaves."""
    task = session.task
    say(f"task {task.id} ({task.environment}, {task.split})", "dim")
    say(task.instruction, "bold cyan")
    say(session.first)
    while (line := typed("> ")) is not None and line != "/quit":
        if line == "/next":
            return True
        try:
            _obey(session, line, reasoning)
        except DreamGymError as error:
            say(str(error), "yellow")
    return False


def _obey(session: Session, line: str, reasoning: bool) -> None:
    calls, (command, _, text) = is_tool_task(session.task), line.partition(" ")
    match command:
        case "":
            pass
        case "/help":
            say(HELP_CALLS if calls else HELP_TEXT, "dim")
        case "/why":
            _show_reasons(session)
        case "/tools" if calls:
            _show_tools(session.task)
        case "/answer" if calls and text:
            _act(session, render_answer(text.strip()), reasoning)
        case _ if command.startswith("/"):
            known = COMMANDS if calls else [each for each in COMMANDS if each not in ("/tools", "/answer")]
            if command in known:
                raise ConfigurationError("/answer needs a text: /answer The flight is booked.")
            raise ConfigurationError.unknown("command", command, known)
        case _:
            _act(session, typed_call(line, schemas(session.task)) if calls else line, reasoning)


def _act(session: Session, action: str, reasoning: bool) -> None:
    """Play the action. Print the observation as the policy sees it, and the outcome at the end."""
    last = session.act(action)
    say(last.next_observation or "(nothing)")
    if not last.valid:
        say("invalid", "yellow")
    if reasoning:
        _show_reasons(session)
    if session.over:
        outcome = "success" if session.success else "failure" if last.terminated else "cut short by the step limit"
        reward = sum(step.reward for step in session.steps)
        style = "bold green" if session.success else "bold red"
        say(f"{outcome}: reward {reward:g} in {len(session.steps)} actions", style)


def _show_reasons(session: Session) -> None:
    if not session.steps:
        raise ConfigurationError("there is no answer yet: act first")
    last = session.steps[-1]
    verdict = f"{'valid' if last.valid else 'invalid'}, reward {last.reward:g}"
    for how, name in (("decided", last.decided_by), ("judged", last.judged_by)):
        verdict += f", {how} by {DECIDERS.get(name, name)}" if name else ""
    say(f"{last.reasoning or '(the real environment gives no reasons)'}\n{verdict}", "dim")


def _show_tools(task: Task) -> None:
    for function in schemas(task):
        parameters = function.get("parameters")
        schema = json.dumps(parameters, ensure_ascii=False) if parameters else "(its schema is not known)"
        say(function["name"], "bold")
        say("\n".join(filter(None, (function.get("description"), schema))), "dim")


def typed_call(line: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The action of a typed `name key=value ...`, or of an unchecked call in JSON.

    A value is JSON where it can be read as such and the schema does not ask for a string. Raises `ConfigurationError` for an
    unknown tool or argument, and a line that cannot be read; the dream answers for arguments that are missing.
    """
    try:
        if line.startswith("{"):
            action = parse_action(line)
            return render_call(*action) if isinstance(action, ToolCall) else render_answer(action)
        name, *words = shlex.split(line)
    except ValueError as error:
        raise ConfigurationError(f"{line[:80]!r} cannot be read ({error}); write NAME KEY=VALUE ... or JSON") from None
    parameters = {tool["name"]: tool.get("parameters") or {} for tool in tools}
    if name not in parameters:
        raise ConfigurationError.unknown("tool", name, parameters)
    properties: Mapping[str, Any] = parameters[name].get("properties", {})
    arguments: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign:
            raise ConfigurationError(f"{word!r} is no argument; write KEY=VALUE, in quotes where it has spaces")
        if properties and key not in properties:
            raise ConfigurationError.unknown(f"argument of {name}", key, properties)
        arguments[key] = text
        if properties.get(key, {}).get("type") != "string":
            with suppress(ValueError):
                arguments[key] = json.loads(text)
    return render_call(name, arguments)
