"""`dreamgym play my_app.py:graph`: the agent acts, and a person answers its tool calls."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable

from dreamgym_lg.actions import parse_action, parse_call, tool_line
from dreamgym_lg.cli.console import say, typed
from dreamgym_lg.cli.play_session import store_played
from dreamgym_lg.dream import Answer
from dreamgym_lg.dream.returns import fits_returns
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, PredictionFailed, RunStopped
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.experience_models import is_local_model
from dreamgym_lg.hosted.chat_model import load_chat_model
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.simulate.context import Call
from dreamgym_lg.simulate.object_graph import reachable
from dreamgym_lg.tasks import schemas
from dreamgym_lg.types import Act, StepResult, Task, Trajectory

PERSON = "person"
"""The experience version of what a person answered."""

_HELP = (
    "You are the world of this agent: no tool runs, you answer its calls, as the agent would read it; where a tool returns a "
    "structure, in JSON. A line that ends with \\ goes on in the next. /quit leaves, as does the end of the input."
)


class PersonEnvironment(Environment):
    """A world that a person plays at the terminal. Its steps raise `RunStopped` where they leave."""

    def reset(self, task: Task) -> str:
        self._task = task
        return task.instruction

    def step(self, action: str) -> StepResult:
        if (call := parse_call(action)) is None:
            return self._judge(str(parse_action(action)))
        shown = next((tool for tool in schemas(self._task) if tool["name"] == call.name), {"name": call.name})
        say(f"the agent calls {call.name}", "bold cyan")
        say(tool_line(shown), "dim")
        say(json.dumps(call.arguments, indent=2, ensure_ascii=False))

        def read(text: str) -> StepResult:
            if not fits_returns(self._task, action, Answer(text)):
                schema = json.dumps(shown.get("returns"), ensure_ascii=False)
                raise PredictionFailed(f"the tool {call.name!r} returns JSON of the schema {schema}")
            return StepResult(text, 0.0, False, False, {})

        return _ask("answer", read)

    async def astep(self, action: str) -> StepResult:
        return self.step(action)  # on the loop: while a person types, nothing else goes on

    def _judge(self, answer: str) -> StepResult:
        say("the agent's final answer", "bold cyan")
        say(answer or "(nothing)")

        def read(text: str) -> StepResult:
            reward = _reward(text)
            return StepResult("", reward, True, False, {"success": reward == 1})

        return _ask("reward, 0 to 1", read)


def _reward(text: str) -> float:
    try:
        reward = float(text)
    except ValueError:
        reward = -1.0
    if not 0 <= reward <= 1:
        raise PredictionFailed(f"{text[:80]!r} is no number from 0 to 1; 1 is a success")
    return reward


class _Left(RunStopped):
    """The person has left."""


def _ask(what: str, read: Callable[[str], StepResult]) -> StepResult:
    """Ask until `read` raises no `PredictionFailed`."""
    while True:
        try:
            text = _typed_lines(what)
        except KeyboardInterrupt:
            raise _Left from None
        if text is None or text == "/quit":
            raise _Left
        try:
            return read(text)
        except PredictionFailed as error:
            say(str(error), "yellow")


def _typed_lines(what: str) -> str | None:
    lines = [typed(f"{what}> ")]
    while (last := lines[-1]) is not None and last.endswith("\\"):
        lines[-1:] = [last[:-1], typed("... ")]
    return None if None in lines else "\n".join(map(str, lines))


def play_agent(
    path: str, graph: object, *, policy: str | None, replay_buffer: Path | None, task: str | None, record: bool, **world: Any
) -> None:
    """Play episodes of an agent until the person leaves; of `task`, one.

    Args:
        path: Where the agent is written, as `DreamGym` takes it; also the environment of tasks that are typed.
        graph: The agent, loaded.
        policy: A chat model's name or folder. Default: the agent's own models.
        replay_buffer: Holds `task`, and takes what is recorded.
        task: A stored task's id. Default: the person types instructions.
        world: `isolation` and the options of `simulated`, as of `AgentWorld`.

    Raises `ConfigurationError` as `AgentWorld` does, and for what is needed and not given.
    """
    if (record or task) and replay_buffer is None:
        raise ConfigurationError(f"{'--record' if record else '--task'} needs a --replay-buffer")
    acting, told = _load_policy(policy), ""
    if policy is None and world["isolation"] == "guard":
        told = "The agent's own models are really asked."
    elif policy is None:
        acting, told = _own_model(graph)
    own = AgentWorld(path, payload=_payload, route=_none if acting is None else None, **world)
    agent = own.agent(acting or FakeListChatModel(responses=[]), real=False)  # which is never asked
    say(f"{_HELP} {told}".strip())
    with ReplayBuffer(replay_buffer or ":memory:") as buffer, _own_loop() as run:
        for each in [_stored(buffer, task)] if task else _typed_tasks(path):
            playing = rollout(agent, [own.with_tools(each)], PersonEnvironment, source="synthetic", experience_version=PERSON)
            try:
                [episode] = run(playing)
            except _Left:
                say("you left before the episode's end: it is not stored", "yellow")
                return
            show_episode(episode)
            if record:
                store_played(buffer, episode, policy_version=policy or "its own")


def show_episode(episode: Trajectory) -> None:
    """All that happened, in order, each with its line of the agent's code."""
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


class _Provided(BaseChatModel):
    """A provider's model as a policy: a policy is given tools in OpenAI's form, a provider's class makes its own of them."""

    model: BaseChatModel

    @property
    def _llm_type(self) -> str:
        return self.model._llm_type

    def _generate(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **given: Any) -> ChatResult:
        return _as_result(self._bound(given).invoke(messages, stop=stop))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **given: Any
    ) -> ChatResult:
        return _as_result(await self._bound(given).ainvoke(messages, stop=stop))

    def _bound(self, given: dict[str, Any]) -> Runnable[Any, AIMessage]:
        if not (tools := given.pop("tools", None)):
            return self.model.bind(**given)
        choice = given.pop("tool_choice", None)
        chosen = {"tool_choice": "any" if choice == "required" else choice} if choice else {}  # LangChain's word for it
        return self.model.bind_tools(tools, **chosen).bind(**given)


def _as_result(reply: AIMessage) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=reply)])


def _load_policy(name: str | None) -> BaseChatModel | None:
    if name is None:
        return None
    if not is_local_model(name):
        return _Provided(model=load_chat_model(name))
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    return LocalChatModel.from_path(name, temperature=0)


def _own_model(graph: object) -> tuple[BaseChatModel | None, str]:
    """The agent's one chat model, and what to tell the person; None if it has several or makes them as it runs.

    The network is behind the wall, so that this process asks for the agent.
    """
    models = [each for each in reachable(graph) if isinstance(each, BaseChatModel)]
    named = (f"{type(each).__name__} {each._get_ls_params().get('ls_model_name') or ''}".strip() for each in models)
    names = ", ".join(sorted(named))
    if len(models) == 1:
        return _Provided(model=models[0]), f"The agent's own model, {names}, is really asked."
    return None, (
        f"The agent's own models ({names or 'made while it runs'}) are asked from behind the wall: one that needs the network "
        "needs --allow-host HOST:PORT; or name one --policy for all, or choose --isolation guard."
    )


def _none(call: Call) -> bool:
    """Selects no call for the policy; a function of a module, which can be sent to a worker."""
    return False


def _payload(task: Task) -> Any:
    """An instruction that is a JSON object is the graph's input itself; any other a message."""
    try:
        found = json.loads(task.instruction)
    except ValueError:
        found = None
    return found if isinstance(found, Mapping) else {"messages": [HumanMessage(task.instruction)]}


def _typed_tasks(name: str) -> Iterator[Task]:
    while (text := _typed_lines("what is the agent to do")) is not None and text != "/quit":
        if text:
            yield Task(id=f"{PERSON}-{blake2b(text.encode(), digest_size=6).hexdigest()}", instruction=text, environment=name)


def _stored(buffer: ReplayBuffer, id: str) -> Task:
    tasks = {task.id: task for task in buffer.tasks()}
    if id not in tasks:
        raise ConfigurationError.unknown("task", id, tasks)
    return tasks[id]


@contextmanager
def _own_loop() -> Iterator[Callable[[Coroutine[Any, Any, list[Trajectory]]], list[Trajectory]]]:
    """A loop for all episodes, in which Ctrl-C ends a question at once: `asyncio.run` would wait for its answer."""
    loop = asyncio.new_event_loop()

    def run(coroutine: Coroutine[Any, Any, list[Trajectory]]) -> list[Trajectory]:
        playing = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(playing)
        except KeyboardInterrupt:
            playing.cancel()
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(playing)
            raise

    try:
        yield run
    finally:
        loop.close()
