"""`dreamgym play my_app.py:graph`: the agent acts, and a person answers its tool calls."""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel, FakeListChatModel

from dreamgym_lg.actions import parse_action, parse_call, tool_line
from dreamgym_lg.cli.console import say, typed
from dreamgym_lg.dream import Answer, Dream, Episode, Verdict
from dreamgym_lg.dream.schemas import fits_returns, returns_schema
from dreamgym_lg.errors import ConfigurationError, RunStopped
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.experience_models import is_local_model
from dreamgym_lg.hosted.chat_model import load_chat_model
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate.episode import Call
from dreamgym_lg.simulate.object_graph import reachable
from dreamgym_lg.tasks import agent_input, schemas
from dreamgym_lg.types import Act, Task, Trajectory

T = TypeVar("T")

PLAY, PERSON = "play", "person"
"""Under which run recorded sessions are stored, and who acted or answered there."""

HOW = (
    "You are the world of this agent: no tool runs, you answer its calls, as the agent would read it; where a tool returns a "
    "structure, in JSON. A line that ends with \\ goes on in the next. /help shows this, /quit leaves, as does the end of the "
    "input."
)


def play_agent(
    path: str, graph: object, policy: str | None, *, buffer: Path | None, task: str | None, record: bool, **world: Any
) -> None:
    """Play episodes of an agent until the person leaves; of `task`, one.

    Args:
        path: Where the agent is written, as `DreamGym` takes it; also the environment of tasks that are typed.
        graph: The agent, loaded.
        policy: A chat model's name or folder. Default: the agent's own models.
        buffer: Holds `task`, and takes what is recorded.
        task: A stored task's id. Default: the person types instructions.
        world: `isolation` and the options of `simulated`, as of `AgentWorld`.

    Raises `ConfigurationError` as `AgentWorld` does, and for --task and --record without a buffer.
    """
    if (record or task) and buffer is None:
        raise ConfigurationError(f"{'--record' if record else '--task'} needs a --replay-buffer")
    acting, notice = _policy(policy, graph, guarded=world["isolation"] == "guard")
    own = AgentWorld(path, payload=_payload, route=_no_call if acting is None else None, **world)
    agent = own.agent(acting or FakeListChatModel(responses=[]), real=False)  # which is never asked
    say(f"{HOW} {notice}".strip())
    dream = Dream([Person()], judges=[Person()])
    with ReplayBuffer(buffer or ":memory:") as replay_buffer, _interruptible():
        try:
            for each in [stored_task(replay_buffer, task)] if task else _typed_tasks(path):
                tasks = [own.with_tools(each)]
                playing = rollout(agent, tasks, dream.create_environment, source="synthetic", experience_version=PERSON)
                [episode] = run_lasting(playing)
                show_episode(episode)
                if record:
                    store_played(replay_buffer, episode, policy_version=policy or "its own")
        except Left:
            say("you left before the episode's end: it is not stored", "yellow")


def store_played(buffer: ReplayBuffer, played: Trajectory, *, policy_version: str = PERSON) -> None:
    """Store an episode as run `play`, under the first rollout index that is free."""
    for index in count():
        if buffer.add(replace(played, run=PLAY, rollout_index=index, policy_version=policy_version)):
            return


def stored_task(buffer: ReplayBuffer, task_id: str) -> Task:
    """The task of this id. Raises `ConfigurationError` if there is none."""
    tasks = {task.id: task for task in buffer.tasks()}
    if task_id not in tasks:
        raise ConfigurationError.unknown("task", task_id, tasks)
    return tasks[task_id]


class Left(RunStopped):
    """The person has left."""


class Person:
    """Responder and judge at the terminal, the only part of the dream."""

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
    """Ask until `read` accepts the text; explain at /help. Raises `Left` where the person leaves."""
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
            say(HOW, "dim")
        except ConfigurationError as error:
            say(str(error), "yellow")


def show_episode(episode: Trajectory) -> None:
    """Print all that happened, in order, each with its line of the agent's code."""
    say("what happened", "bold")
    for each in episode.in_order:
        kind: str = each.kind if isinstance(each, Act) else "simulated" if each.valid else "refused"
        text, answer = (each.text, each.answer) if isinstance(each, Act) else (each.action, each.next_observation)
        say(f"{kind}: {text}", "" if kind in ("simulated", "passed through") else "red")
        say("\n".join(f"    {line}" for line in (f"-> {answer}" if answer else "", each.line) if line), "dim")
    if episode.error is not None:
        say(f"failed: {episode.error}", "bold red")
    else:
        outcome = "success" if episode.success else "cut short" if episode.steps[-1].truncated else "failure"
        say(f"{outcome}: reward {episode.reward:g}", "bold green" if episode.success else "bold red")


def _policy(name: str | None, graph: object, *, guarded: bool) -> tuple[BaseChatModel | None, str]:
    """The chat model that acts and a notice; None: the agent asks its own models.

    Behind the wall is no network, so that this process asks for an agent with one model.
    """
    if name is not None and not is_local_model(name):
        return load_chat_model(name), ""
    if name is not None:
        from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

        return LocalChatModel.from_path(name, temperature=0), ""
    if guarded:
        return None, "The agent's own models are really asked."
    models = [each for each in reachable(graph) if isinstance(each, BaseChatModel)]
    names = sorted(f"{type(each).__name__} {each._get_ls_params().get('ls_model_name') or ''}".strip() for each in models)
    if len(models) == 1:
        return models[0], f"The agent's own model, {names[0]}, is really asked."
    return None, (
        f"The agent's own models ({', '.join(names) or 'made while it runs'}) are asked behind the wall, where no network "
        "is: name one --policy for all, or choose --isolation guard."
    )


def _no_call(call: Call) -> bool:
    """Selects no call for the policy. A function of a module can be sent to a worker."""
    return False


def _payload(task: Task) -> Any:
    """The graph's input: a typed JSON object as it is, any other instruction as a message, a recorded task's messages."""
    try:
        payload = None if task.messages else json.loads(task.instruction)
    except ValueError:
        payload = None
    return payload if isinstance(payload, Mapping) else agent_input(task)


def _typed_tasks(name: str) -> Iterator[Task]:
    while (text := typed("what is the agent to do> ")) is not None and text != "/quit":
        if text == "/help":
            say(HOW, "dim")
        elif text:
            yield Task(id=f"{PERSON}-{blake2b(text.encode(), digest_size=6).hexdigest()}", instruction=text, environment=name)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends a question at once; asyncio's own handler would wait for the person's answer."""
    before = signal.signal(signal.SIGINT, lambda *arguments: signal.default_int_handler(*arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
