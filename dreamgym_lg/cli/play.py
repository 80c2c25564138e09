"""`dreamgym play`: a person acts in the dream or in the real environment, or answers the tool calls of an agent."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dreamgym_lg.actions import render_answer
from dreamgym_lg.cli.agent import PassThrough, SimulateNode
from dreamgym_lg.cli.console import console, errors_shown, say, typed, visible
from dreamgym_lg.cli.experiment import WORLD_HELP, is_object, open_experiment
from dreamgym_lg.cli.fidelity import Model, check_source
from dreamgym_lg.cli.play_agent import PERSON, play_agent
from dreamgym_lg.cli.play_session import Session, store_played, typed_call
from dreamgym_lg.dream import Dream, usual_dream
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.experiment.experience_models import load_experience_model
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.world import World
from dreamgym_lg.gym import DreamGym
from dreamgym_lg.hosted.chat_model import EXAMPLE_MODEL
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.simulate import Allow
from dreamgym_lg.simulate.loading import compiled, load_object
from dreamgym_lg.simulate.wall.wall import Isolation
from dreamgym_lg.tasks import is_tool_task, schemas
from dreamgym_lg.types import DECIDERS, Split, Task

COMMANDS = {
    "why": "the reasoning, the verdict and the reward of the last answer",
    "undo": "take the last action back; those before it are played again",
    "reset": "begin the task anew",
    "next": "go on to another task",
    "task": "what is to be done, and where",
    "tools": "what can be called (tool agents)",
    "answer": "/answer TEXT gives the final answer, which ends the episode (tool agents)",
    "help": "these lines",
    "quit": "leave, as does the end of the input",
}

Played = Annotated[
    str | None,
    typer.Argument(metavar="WORLD", help=f"{WORLD_HELP} Or [b]FILE.py:NAME[/b] of an agent's graph, whose world you are."),
]
OwnBuffer = Annotated[
    Path | None,
    typer.Option(
        help="In place of an experiment: your own replay buffer. Of an agent: holds the --task, takes what you --record.",
        dir_okay=False,
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(help=f"Of an agent: the chat model that acts, e.g. {EXAMPLE_MODEL}, or its folder. Default: its own models."),
]
Isolated = Annotated[
    Isolation | None,
    typer.Option(help="Of an agent: what keeps it from the real world. Default: process, a wall of the kernel."),
]
AllowPath = Annotated[list[Path] | None, typer.Option(help="Of an agent: a file or folder that it may write; may be repeated.")]
AllowHost = Annotated[list[str] | None, typer.Option(help="Of an agent: HOST or HOST:PORT that it may reach; may be repeated.")]
Real = Annotated[
    bool, typer.Option("--real", help="The real environment answers, in place of the dream (an experiment's only).")
]
Chosen = Annotated[Split | None, typer.Option(help="Whose tasks are played. Default: test; of a replay buffer, any.")]
TaskId = Annotated[str | None, typer.Option("--task", help="The id of the task to begin with.")]
Reasoning = Annotated[bool, typer.Option("--reasoning", help="Show /why after every answer.")]
Record = Annotated[bool, typer.Option("--record", help="Store what was played in the replay buffer, as run 'play'.")]


def play(
    world: Played = None,
    replay_buffer: OwnBuffer = None,
    experience_model: Model = None,
    real: Real = False,
    split: Chosen = None,
    task: TaskId = None,
    reasoning: Reasoning = False,
    record: Record = False,
    policy: Policy = None,
    isolation: Isolated = None,
    pass_through: PassThrough = None,
    simulate_node: SimulateNode = None,
    allow_path: AllowPath = None,
    allow_host: AllowHost = None,
) -> None:
    """Act yourself, in the dream or in the real environment; or be the world of your own agent. /help inside says how.

    The dream is that of an experiment's newest experience model, or of the one that you name, on the tasks of a replay buffer.

    Of an agent's graph the agent acts, behind the wall as in DreamGym("FILE.py:NAME"), and you answer its tool calls: none of
    its tools runs. You type its instruction, or name a --task of a --replay-buffer; --record stores the episode there. At its
    end all that happened is shown, with the lines of the agent's code: simulated calls, tools that really ran, and what was
    stopped.
    """
    with errors_shown():
        found = load_object(world) if world is not None and is_object(world) else None
        if world is not None and found is not None and not isinstance(found, DreamGym | Experiment | World):
            others = {"--experience-model": experience_model, "--real": real, "--split": split, "--reasoning": reasoning}
            for option, given in others.items():
                if given:
                    raise ConfigurationError(f"{option} with {world}: you are the world of this agent; leave it away")
            play_agent(
                world,
                compiled(found),
                policy=policy,
                replay_buffer=replay_buffer,
                task=task,
                record=record,
                isolation=isolation,
                pass_through=pass_through or (),
                simulate_nodes=simulate_node or (),
                allow=Allow(hosts=allow_host or (), paths=allow_path or ()) if allow_host or allow_path else None,
            )
            return
        of_agents: dict[str, object] = {"--policy": policy, "--isolation": isolation, "--pass-through": pass_through}
        of_agents |= {"--simulate-node": simulate_node, "--allow-path": allow_path, "--allow-host": allow_host}
        for option, chosen in of_agents.items():
            if chosen:
                raise ConfigurationError(f"{option} is for an agent's graph, FILE.py:NAME; in a world you act: leave it away")
        with _place(world, found, replay_buffer, experience_model, real) as place:
            Player(place, place.choose(split, task), reasoning=reasoning, record=record).run()


class Place(NamedTuple):
    """Where a person plays, and what of it is told and recorded."""

    environment: Environment
    replay_buffer: ReplayBuffer
    tasks: Callable[[Split | None], list[Task]]
    """The tasks of a split; None: of the one that is played by default."""
    described: str
    max_steps: int | None = None
    """As for the policy; None for no limit."""
    experience_version: str = ""
    """Empty where the real environment answers."""

    def choose(self, split: Split | None, task_id: str | None) -> list[Task]:
        """The tasks to play, the wanted one first. Raises `ConfigurationError` if there is none."""
        stored = self.replay_buffer.tasks()
        first = [task for task in stored if task.id == task_id]
        if task_id and not first:
            raise ConfigurationError.unknown("task", task_id, [task.id for task in stored])
        found = [*first, *(task for task in self.tasks(split) if task.id != task_id)]
        if not found:
            raise ConfigurationError(f"there is no task of the split {split or 'test'!r}: choose another --split")
        return found


def _place(
    world: str | None, loaded: object, replay_buffer: Path | None, model: str | None, real: bool
) -> AbstractContextManager[Place]:
    check_source(world, replay_buffer, model)
    if world is not None:
        return _of_experiment(world, loaded, real)
    assert replay_buffer is not None and model is not None  # by check_source
    return _of_buffer(replay_buffer, model, real)


@contextmanager
def _of_experiment(given: str, loaded: object, real: bool) -> Iterator[Place]:
    work = open_experiment(given, loaded=loaded, existing=True)
    with work.replay_buffer as buffer:
        place = partial(
            Place,
            replay_buffer=buffer,
            tasks=lambda split: work.tasks(split or "test"),
            max_steps=work.world.max_steps,
        )
        if real:
            with closing(work.world.create_environment()) as environment:
                yield place(environment, described="the real environment")
            return
        if not work.can_dream:
            raise ConfigurationError(f"{work.out} holds no experience model yet: run `dreamgym train` first, or play --real")
        dream = work.dream(own_process=False)
        yield place(dream.create_environment(), described=_described(dream), experience_version=dream.version)


@contextmanager
def _of_buffer(file: Path, model: str, real: bool) -> Iterator[Place]:
    if real:
        raise ConfigurationError("--real needs a WORLD: a replay buffer does not hold the tools themselves")
    if not file.exists():
        raise ConfigurationError(f"the replay buffer {file} does not exist: `dreamgym import` makes one of your traces")
    with ReplayBuffer(file) as buffer:
        dream = usual_dream(load_experience_model(model, buffer))
        yield Place(
            dream.create_environment(),
            buffer,
            tasks=lambda split: buffer.tasks(split=split, origin="real"),
            described=_described(dream),
            experience_version=dream.version,
        )


def _described(dream: Dream) -> str:
    parts = ", ".join(DECIDERS.get(part.name, part.name) for part in dream.responders)
    return f"the dream {dream.version}, answered by {parts}"


class Player:
    """The terminal around a session. Raises what the first task's start raises; later errors are shown."""

    def __init__(self, place: Place, tasks: Sequence[Task], *, reasoning: bool = False, record: bool = False) -> None:
        self.place, self.tasks, self.reasoning, self.record = place, tasks, reasoning, record
        self.number = 0
        self.session = Session(place.environment, tasks[0], place.max_steps)

    def run(self) -> None:
        """Until /quit or the end of the input. What was played is recorded when it is left, also by Ctrl-C."""
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing and the arrow keys in input())
        console.print(f"You act in {visible(self.place.described)}. /help says how.", markup=False, soft_wrap=True)
        self.task()
        try:
            while (line := typed("> ")) is not None and line != "/quit":
                try:
                    self.hear(line)
                except DreamGymError as error:
                    say(str(error), "yellow")
        finally:
            self.leave()

    def hear(self, line: str) -> None:
        """One line of a person: a command or an action."""
        if not line:
            return
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            if name not in COMMANDS or name == "quit":
                raise ConfigurationError.unknown("command", line.split()[0], [f"/{each}" for each in COMMANDS])
            getattr(self, name)(*([rest.strip()] if name == "answer" else []))
            return
        self._act(typed_call(line, schemas(self.session.task)) if is_tool_task(self.session.task) else line)

    def _act(self, action: str) -> None:
        self.session.act(action)
        self._show_answer()

    def _show_answer(self) -> None:
        """The newest observation, as the policy sees it, and what a person should know of it."""
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

    # --- the commands -------------------------------------------------------------------------------------------------------

    def why(self) -> None:
        if not self.session.steps:
            raise ConfigurationError("there is no answer yet: act first")
        last = self.session.steps[-1]
        reason = last.reasoning
        verdict = f"{'valid' if last.valid else 'invalid'}, reward {last.reward:g}"
        if last.decided_by:
            verdict += f", decided by {DECIDERS.get(last.decided_by, last.decided_by)}"
        say(f"{reason or '(the real environment gives no reasons)'}\n{verdict}", "dim")

    def undo(self) -> None:
        if not self.session.steps:
            raise ConfigurationError("there is no action to take back")
        self.session.undo()
        self._show_answer()

    def reset(self) -> None:
        self.leave()
        self.session.begin()
        self._show_answer()

    def next(self) -> None:
        self.leave()
        self.number = (self.number + 1) % len(self.tasks)
        self.session = Session(self.place.environment, self.tasks[self.number], self.place.max_steps)
        self.task()

    def task(self) -> None:
        task = self.session.task
        say(f"task {task.id} ({task.environment}, {task.split})", "dim")
        say(task.instruction, "bold cyan")
        self._show_answer()

    def tools(self) -> None:
        if not (found := schemas(self.session.task)):
            how = "/answer alone ends it" if is_tool_task(self.session.task) else "type the action as text"
            raise ConfigurationError(f"this task has no tools: {how}")
        for tool in found:
            say(tool["name"], "bold")
            schema = tool.get("parameters")
            told = json.dumps(schema, ensure_ascii=False) if schema else "(its schema is not known)"
            say("\n".join(filter(None, (tool.get("description"), told))), "dim")

    def answer(self, text: str) -> None:
        if not is_tool_task(self.session.task):
            raise ConfigurationError("this task has no tools, so no final answer ends it: type the action as text")
        if not text:
            raise ConfigurationError("/answer needs a text: /answer The flight is booked.")
        self._act(render_answer(text))

    def help(self) -> None:
        how = "NAME KEY=VALUE ..., or JSON" if is_tool_task(self.session.task) else "any text"
        say("\n".join([f"an action: {how}", *(f"/{name:<7} {what}" for name, what in COMMANDS.items())]), "dim")

    def leave(self) -> None:
        """Record what was played, if that is wanted and anything was."""
        if self.record and self.session.steps:
            played = self.session.trajectory(self.place.experience_version)
            store_played(self.place.replay_buffer, played, policy_version=PERSON)
