"""`dreamgym play`: a person acts in a dream, or answers the calls of an agent."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, TypeVar

import typer

from dreamgym_lg.actions import parse_action, parse_call, readable, render_answer, render_call, tool_line
from dreamgym_lg.cli.agent import PassThrough, SimulateNode
from dreamgym_lg.cli.console import chosen, errors_shown, say, typed
from dreamgym_lg.cli.experiment import WORLD_HELP, ModelName, is_object, opened_dream
from dreamgym_lg.dream import Answer, Dream, Episode, Verdict
from dreamgym_lg.dream.dream import DreamEnvironment
from dreamgym_lg.dream.schemas import fits_returns, returns_schema
from dreamgym_lg.errors import ConfigurationError, DreamGymError, RunStopped
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.experience_models import resolve_policy
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.world import World
from dreamgym_lg.gym import DreamGym
from dreamgym_lg.hosted import EXAMPLE_MODEL
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate.wall.wall import Isolation
from dreamgym_lg.tasks import agent_input, is_tool_task, schemas
from dreamgym_lg.types import DECIDERS, Act, StepResult, Task, Trajectory
from dreamgym_lg.user_code import compiled, load_object

T = TypeVar("T")

PLAY, PERSON = "play", "person"
"""Run name of recorded sessions; name of the person as policy and as part of a dream."""

HELP_WORLD = (
    "You are the world of this agent: no tool runs, you answer its calls, as the agent would read it; where a tool returns a "
    "structure, in JSON. You are its user too: reply to its messages; an empty line ends the talk. A line that ends with "
    "\\ goes on in the next. /help shows this, /quit leaves, as does the end of the input."
)
HELP_ACTING = (
    "An action is any text. /next goes on to another task, /help shows this, /quit leaves, as does the end of the input."
)
HELP_CALLING = HELP_ACTING.replace("any text", 'NAME {"KEY": VALUE}, or /answer TEXT for the final answer')

WORLD_OR_AGENT = f"{WORLD_HELP} Or [b]FILE.py:NAME[/b] of an agent's graph, whose world you are."
BUFFER_HELP = "In place of an experiment: your own replay buffer. Of an agent: holds the --task, takes what you --record."
POLICY_HELP = f"Of an agent: the chat model that acts, e.g. {EXAMPLE_MODEL}, or its folder. Default: its own, where it has one."
ISOLATION_HELP = "Of an agent: what keeps it from the real world. Default: process, a wall of the kernel."


def play(
    world: Annotated[str | None, typer.Argument(metavar="WORLD", help=WORLD_OR_AGENT)] = None,
    replay_buffer: Annotated[Path | None, typer.Option(help=BUFFER_HELP, dir_okay=False)] = None,
    experience_model: ModelName = None,
    task: Annotated[str | None, typer.Option(help="The id of the task to begin with.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Store what was played in the buffer, as run 'play'.")] = False,
    policy: Annotated[str | None, typer.Option(help=POLICY_HELP)] = None,
    isolation: Annotated[Isolation | None, typer.Option(help=ISOLATION_HELP)] = None,
    pass_through: PassThrough = None,
    simulate_node: SimulateNode = None,
) -> None:
    """Act yourself in a dream, or be the world of your own agent. Type /help inside for its commands.

    The dream is that of an experiment's newest experience model, or of the one that you name, on the tasks of a replay buffer.

    Of an agent's graph the agent acts behind the wall, and you answer its tool calls and its messages: none of its tools runs.
    You type its instruction, or name a --task of a --replay-buffer; --record stores the episode there.
    """
    with errors_shown():
        loaded = load_object(world) if world is not None and is_object(world) else None
        if world is not None and not isinstance(loaded, DreamGym | Experiment | World | None):
            if experience_model is not None:
                raise ConfigurationError(f"--experience-model with {world}: you are the world of this agent; leave it away")
            options = chosen(isolation=isolation, pass_through=pass_through, simulate_nodes=simulate_node)
            play_agent(world, compiled(loaded), policy, buffer=replay_buffer, task=task, record=record, **options)
            return
        of_agents = {"policy": policy, "isolation": isolation, "pass-through": pass_through, "simulate-node": simulate_node}
        for name, value in of_agents.items():
            if value:
                raise ConfigurationError(f"--{name} is for an agent's graph, FILE.py:NAME; in a world you act: leave it away")
        with opened_dream(world, replay_buffer, experience_model, loaded) as (buffer, dream, work):
            tasks = (work.tasks("test") or work.tasks("train")) if work else buffer.tasks(origin="real")
            first = [stored_task(buffer, task)] if task else []
            play_tasks(buffer, dream, [*first, *(each for each in tasks if each.id != task)], record)


def store_played(buffer: ReplayBuffer, played: Trajectory, *, policy_version: str = PERSON) -> None:
    """Store an episode in the run `play`, under the first free rollout index."""
    for index in count():
        if buffer.add(replace(played, run=PLAY, rollout_index=index, policy_version=policy_version)):
            return


def stored_task(buffer: ReplayBuffer, task_id: str) -> Task:
    """The task of this id. Raises `ConfigurationError` if there is none."""
    tasks = {task.id: task for task in buffer.tasks()}
    if task_id not in tasks:
        raise ConfigurationError.unknown("task", task_id, tasks)
    return tasks[task_id]


# --- a person acts -------------------------------------------------------------------------------------------------------


def play_tasks(buffer: ReplayBuffer, dream: Dream, tasks: Sequence[Task], record: bool) -> None:
    """Play the tasks until the person leaves. With `record`, each episode is stored when it ends, also by Ctrl-C."""
    if not tasks:
        raise ConfigurationError("there is no task to play: import traces, or name a --task")
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and the arrow keys in input())
    parts = ", ".join(DECIDERS.get(part.name, part.name) for part in dream.responders)
    say(f"You act in the dream {dream.version}, answered by {parts}.")
    for task in tasks:
        environment, results = dream.create_environment(), list[StepResult]()
        try:
            if not _play_task(environment, task, results):
                return
        finally:
            if record and results:
                *steps, last = environment.steps[: len(results)]
                steps.append(replace(last, truncated=not last.terminated))
                success = bool(results[-1].info["success"])
                played = Trajectory(
                    task=task, steps=steps, success=success, source="synthetic", experience_version=dream.version
                )
                store_played(buffer, played)


def _play_task(environment: DreamEnvironment, task: Task, results: list[StepResult]) -> bool:
    """Carry out the person's lines, and append the results to `results`. False if the person leaves."""
    first = environment.reset(task)
    say(f"task {task.id} ({task.environment}, {task.split})", "dim")
    say(task.instruction, "bold cyan")
    say("\n".join([HELP_CALLING if is_tool_task(task) else HELP_ACTING, *map(tool_line, schemas(task))]), "dim")
    say(first)
    while (line := typed("> ")) is not None and line != "/quit":
        if line == "/next":
            return True
        try:
            if line == "/help":
                say(HELP_CALLING if is_tool_task(task) else HELP_ACTING, "dim")
            elif line:
                results.append(_act(environment, line, task))
        except DreamGymError as error:  # the episode stays as it was
            say(str(error), "yellow")
    return False


def _act(environment: DreamEnvironment, line: str, task: Task) -> StepResult:
    """Play the action, and print the observation, the reasoning and, at the end, the outcome."""
    action = typed_action(line, task)
    if environment.steps and environment.steps[-1].terminated:
        raise ConfigurationError("the episode is over: /next or /quit")
    result = environment.step(action)
    last = environment.steps[-1]
    say(last.next_observation or "(nothing)")
    verdict = f"{'valid' if last.valid else 'invalid'}, reward {last.reward:g}"
    for how, name in (("decided", last.decided_by), ("judged", last.judged_by)):
        verdict += f", {how} by {DECIDERS.get(name, name)}" if name else ""
    say("\n".join(filter(None, (last.reasoning, verdict))), "dim" if last.valid else "yellow")
    if result.terminated:
        success = bool(result.info["success"])
        reward = sum(step.reward for step in environment.steps)
        outcome = f"{'success' if success else 'failure'}: reward {reward:g} in {len(environment.steps)} actions"
        say(outcome, "bold green" if success else "bold red")
    return result


def typed_action(line: str, task: Task) -> str:
    """The action of a typed line: `NAME JSON` or `/answer TEXT`; without tools, the line.

    Raises `ConfigurationError` for an unknown command or tool, and for arguments that are no JSON object.
    """
    calls, (name, _, rest) = is_tool_task(task), line.partition(" ")
    if name.startswith("/") and not (calls and name == "/answer" and rest):
        raise ConfigurationError(f"{name} is no command here. {HELP_CALLING if calls else HELP_ACTING}")
    if not calls:
        return line
    if name == "/answer":
        return render_answer(rest.strip())
    tools = [function["name"] for function in schemas(task)]
    if name not in tools:
        raise ConfigurationError.unknown("tool", name, tools)
    try:
        arguments = json.loads(rest or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ConfigurationError(f'{rest[:80]!r} is no JSON object; write {name} {{"KEY": VALUE}}')
    return render_call(name, arguments)


# --- an agent acts -------------------------------------------------------------------------------------------------------


def play_agent(
    path: str, graph: object, policy: str | None, *, buffer: Path | None, task: str | None, record: bool, **world: Any
) -> None:
    """Play episodes of an agent until the person leaves; one episode with `task`.

    Args:
        path: The agent's path, as for `DreamGym`; also the environment of typed tasks.
        graph: The loaded agent.
        policy: A chat model's name or folder. Default: the agent's own model.
        buffer: Holds `task` and takes recorded episodes.
        task: A stored task's id. Default: the person types instructions.
        world: `isolation` and the options of `simulated`, as for `AgentWorld`.

    Raises `ConfigurationError` as `AgentWorld` does, for --task and --record without a buffer, and without a policy if the
    agent has no model or several.
    """
    if (record or task) and buffer is None:
        raise ConfigurationError(f"{'--record' if record else '--task'} needs a --replay-buffer")
    agent_world = AgentWorld(path, payload=_payload, **world)
    acting = resolve_policy(policy, graph)
    if policy is None:
        say(f"The agent's own model, {type(acting).__name__}, is really asked.")
    agent = agent_world.agent(acting, real=False)
    say(HELP_WORLD)
    with ReplayBuffer(buffer or ":memory:") as replay_buffer, _interruptible():
        try:
            for each in [stored_task(replay_buffer, task)] if task else _typed_tasks(path):
                tasks, has_messages = [agent_world.with_tools(each)], "messages" in _payload(each)
                dream = Dream([Person()], Person() if has_messages else None, [Person()])
                playing = rollout(agent, tasks, dream.create_environment, source="synthetic", experience_version=PERSON)
                [episode] = run_lasting(playing)
                show_episode(episode)
                if record:
                    store_played(replay_buffer, episode, policy_version=policy or "its own")
        except Left:
            say("you left before the episode's end: it is not stored", "yellow")


class Left(RunStopped):
    """The person has left the session."""


class Person:
    """The person at the terminal as responder, user and judge of a dream."""

    name = PERSON

    def respond(self, episode: Episode) -> Answer:
        call = parse_call(episode.action)
        if call is None:
            say(f"the agent's call cannot be read: {episode.action}", "bold cyan")
        else:
            function = next((each for each in schemas(episode.task) if each["name"] == call.name), {"name": call.name})
            say(f"the agent calls {call.name}", "bold cyan")
            say(tool_line(function), "dim")
            say(json.dumps(call.arguments, indent=2, ensure_ascii=False))

        def read(text: str) -> Answer:
            if not fits_returns(episode.task, episode.action, Answer(text)):
                schema = json.dumps(returns_schema(episode.task, episode.action), ensure_ascii=False)
                raise ConfigurationError(f"{text[:80]!r} is not what the tool returns, JSON of the schema {schema}")
            return Answer(text)

        return _ask("answer", read)

    def reply(self, episode: Episode) -> str | None:
        say("the agent's message", "bold cyan")
        say(str(parse_action(episode.action)))
        return _ask("your reply, empty to end", str) or None

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict:
        say("the agent's final answer", "bold cyan")
        say(str(parse_action(episode.action)) or "(nothing)")

        def read(text: str) -> Verdict:
            try:
                reward = float(text)
            except ValueError:
                reward = -1.0
            if not 0 <= reward <= 1:
                raise ConfigurationError(f"{text[:80]!r} is no number from 0 to 1; 1 is a success")
            return Verdict(reward, reward == 1)

        return _ask("reward, 0 to 1", read)


def _ask(prompt: str, read: Callable[[str], T]) -> T:
    """Prompt until `read` accepts the text, or show the help at /help. Raises `Left` if the person leaves."""
    while True:
        try:
            text = typed(f"{prompt}> ")
        except KeyboardInterrupt:
            raise Left from None
        if text is None or text == "/quit":
            raise Left
        try:
            if text != "/help":
                return read(text)
            say(HELP_WORLD, "dim")
        except ConfigurationError as error:
            say(str(error), "yellow")


def show_episode(episode: Trajectory, *, lines: bool = True) -> None:
    """Print an episode's events in order. Args: `lines`, True to show each event's line of code."""
    say("what happened", "bold")
    for each in episode.in_order:
        kind: str = each.kind if isinstance(each, Act) else "simulated" if each.valid else "refused"
        text, answer = (each.text, each.answer) if isinstance(each, Act) else (readable(each.action), each.next_observation)
        say(f"{kind}: {text}", "" if kind in ("simulated", "passed through") else "red")
        if details := [f"    {line}" for line in (f"-> {answer}" if answer else "", each.line * lines) if line]:
            say("\n".join(details), "dim")
    if episode.error is not None:
        say(f"failed: {episode.error}", "bold red")
    else:
        outcome = "success" if episode.success else "cut short" if episode.steps[-1].truncated else "failure"
        say(f"{outcome}: reward {episode.reward:g}", "bold green" if episode.success else "bold red")
        if why := shorten(episode.steps[-1].reasoning, 200):
            say(f"    {why}", "dim")


def _payload(task: Task) -> Any:
    """The graph's input: a typed JSON object as it is, else `agent_input`."""
    try:
        payload = None if task.messages else json.loads(task.instruction)
    except ValueError:
        payload = None
    return payload if isinstance(payload, Mapping) else agent_input(task)


def _typed_tasks(name: str) -> Iterator[Task]:
    while (text := typed("what is the agent to do> ")) is not None and text != "/quit":
        if text == "/help":
            say(HELP_WORLD, "dim")
        elif text:
            yield Task(id=f"{PERSON}-{blake2b(text.encode(), digest_size=6).hexdigest()}", instruction=text, environment=name)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end a prompt at once. asyncio's own handler would wait for the person's answer."""
    before = signal.signal(signal.SIGINT, lambda *arguments: signal.default_int_handler(*arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
