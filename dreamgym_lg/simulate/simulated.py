"""Runs an unmodified graph as an episode: policy and environment answer, nothing real runs."""

import asyncio
import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, Unpack

from langchain_core.language_models import BaseChatModel
from langchain_core.load.serializable import Serializable
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langgraph.types import Interrupt

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.rollout import episode_tracing
from dreamgym_lg.simulate.context import (
    Args,
    Blocked,
    EpisodeBroken,
    Kwargs,
    Method,
    RealAccessBlocked,
    answering_episode,
    dispatch,
    in_episode,
    patch_threads,
    set_var,
    subclasses,
)
from dreamgym_lg.simulate.conversation import MAX_TURNS, NextPayload, Rounds, approve
from dreamgym_lg.simulate.episode import AgentEpisode, EpisodeOptions, check_names
from dreamgym_lg.simulate.guard import Allow, install_guard
from dreamgym_lg.simulate.models import patch_model_class, patch_models
from dreamgym_lg.simulate.tools import patch_tool_class, patch_tools
from dreamgym_lg.simulate.user_code import raising_line
from dreamgym_lg.types import StepResult, Task

METHODS = (
    *("stream", "astream", "get_state", "aget_state", "get_state_history", "aget_state_history"),
    *("bulk_update_state", "abulk_update_state", "update_state", "aupdate_state"),
)
"""All else that a graph offers ends in one of these."""

RECURSION_LIMIT = 50
_UNLIMITED = 9_999
"""What `create_agent` and deepagents set by themselves, and less than LangGraph's default: no choice of the user's."""


class Invocable(Protocol):
    """A compiled graph, or any object whose `invoke` runs one."""

    def invoke(self, payload: Any, /) -> Any: ...


class SimulatedEpisode(AgentEpisode):
    """An episode that runs its graph, under a guard in a dream. Args: as of `simulated` and `AgentEpisode`."""

    graph: Invocable

    def __init__(
        self,
        graph: Invocable,
        *,
        allow: Allow | None = None,
        respond: Callable[[Interrupt], Any] = approve,
        context: Any = None,
        next_payload: NextPayload | None = None,
        read_message: Callable[[Any], str] | None = None,
        max_turns: int = MAX_TURNS,
        **arguments: Any,
    ) -> None:
        super().__init__(graph, **arguments)
        if not isinstance(max_turns, int) or max_turns < 1:
            raise ConfigurationError(f"max_turns={max_turns!r}: give the most replies of the user, at least 1")
        self.blocked: list[Blocked] = []
        """The real accesses that the guard stopped, oldest first."""
        self.allow = None if self._environment is None else allow or Allow()
        self.truncated = False
        """Cut short: by the recursion limit, by the world's step limit, or since interrupts never ended."""
        self.context = context
        self.listener = self._environment if self._environment is not None and self._environment.has_user else None
        """Replies to the agent's messages. None: nobody does, and the first message ends the episode."""
        self.last_action = ""
        """The message that the user answered no more; "" as long as the conversation goes on."""
        self.respond, self.next_payload, self.read_message, self.max_turns = respond, next_payload, read_message, max_turns
        self._twins = GraphTwins()
        self._exit = contextlib.ExitStack()

    def add_blocked(self, blocked: Blocked) -> None:
        self.blocked.append(blocked)
        self.add_act("blocked", f"{blocked.event} of {blocked.target}", line=blocked.where)

    def twin(self, graph: Pregel) -> Pregel:
        return graph if self._environment is None else self._twins.twin(graph)

    def __enter__(self) -> "SimulatedEpisode":
        if self.task is not None and self._environment is not None:
            self._environment.reset(self.task)
        return self._enter()

    async def __aenter__(self) -> "SimulatedEpisode":
        if self.task is not None and self._environment is not None:
            await self._environment.areset(self.task)
        return self._enter()

    def _enter(self) -> "SimulatedEpisode":
        install_episode(guarded=self.allow is not None)
        if self.allow is not None:
            self._exit.enter_context(episode_tracing("dream"))
        self._exit.enter_context(set_var(var_child_runnable_config, None))  # no subgraph of the run it is played in
        self._exit.enter_context(in_episode(self))
        self.owns_threads, self.ended = True, False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exit.close()
        self.ended = True
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | asyncio.CancelledError):
            return
        if isinstance(error, Exception):  # the agent's own: what the world raised is none here
            self.add_act("raised", f"{type(error).__name__}: {error}", line=raising_line(error))
        if self.blocked:  # asyncio's own transports swallow it, as users do
            raise RealAccessBlocked(*self.blocked) from error
        if self.cause is not None:
            raise self.cause

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    # --- running ----------------------------------------------------------------------------------------------------------

    def invoke(self, payload: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the graph until the user ends the conversation; without a user, to its first end.

        Returns the graph's last state, or the result of an object with `invoke`. The recursion limit and `max_turns` truncate.
        """
        run = Rounds(self, payload, config, kwargs)
        with self._truncating(run):
            while True:
                if isinstance(self.graph, Pregel):
                    for chunk in self.graph.stream(run.input, run.config, stream_mode="values", **run.arguments):
                        run.add_chunk(chunk)
                else:
                    run.state = self.graph.invoke(run.input)
                if not run.proceed([self._hear(message) for message in run.messages()]):
                    break
        return run.state

    async def ainvoke(self, payload: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As `invoke`."""
        run = Rounds(self, payload, config, kwargs)
        with self._truncating(run):
            while True:
                if isinstance(self.graph, Pregel):
                    async for chunk in self.graph.astream(run.input, run.config, stream_mode="values", **run.arguments):
                        run.add_chunk(chunk)
                elif (ainvoke := getattr(self.graph, "ainvoke", None)) is not None:
                    run.state = await ainvoke(run.input)
                else:
                    run.state = await asyncio.to_thread(self.graph.invoke, run.input)
                if not run.proceed([await self._ahear(message) for message in run.messages()]):
                    break
        return run.state

    def _hear(self, action: str) -> str | None:
        """The user's reply to a message; None ends the conversation."""
        assert self.listener is not None
        with self._asking_environment():
            self._check_running()
            return self._record_reply(action, self.listener.step(action))

    async def _ahear(self, action: str) -> str | None:
        """As `_hear`."""
        assert self.listener is not None
        with self._asking_environment():
            self._check_running()
            return self._record_reply(action, await self.listener.astep(action))

    def _record_reply(self, action: str, result: StepResult) -> str | None:
        if result.terminated or result.truncated:
            self.last, self.last_action = result, action
            return None
        self.insert(action=action, answer=result.observation, decided_by=str(result.info.get("decided_by", "")))
        return result.observation

    @contextlib.contextmanager
    def _truncating(self, run: Rounds) -> Iterator[None]:
        try:
            yield
            self.truncated |= run.gave_up
        except GraphRecursionError:
            self.truncated = True
        except EpisodeBroken:
            if self.last is None:
                raise
            self.truncated = self.last.truncated


# --- graphs -------------------------------------------------------------------------------------------------------------------


class GraphTwins:
    """The copies of graphs that one episode runs, with its own checkpoints and stores.

    A node cache would replay old actions; a production checkpointer or store would be written to.
    """

    def __init__(self) -> None:
        self._checkpointers: dict[int, InMemorySaver] = {}
        self._stores: dict[int, InMemoryStore] = {}
        self._twins: dict[int, tuple[Pregel, Pregel]] = {}
        """By id of the original and of the twin; both are kept, since the id of a collected object is used again."""
        self._lock = threading.Lock()

    def twin(self, graph: Pregel) -> Pregel:
        """The twin of a graph; of a twin, itself."""
        with self._lock:
            if id(graph) not in self._twins:
                twin = self._create(graph)
                self._twins[id(graph)] = self._twins[id(twin)] = graph, twin
            return self._twins[id(graph)][1]

    def _create(self, graph: Pregel) -> Pregel:
        twin = copy.copy(graph)
        twin.cache = None
        own = (graph.config or {}).get("recursion_limit", _UNLIMITED)
        twin.config = {**(graph.config or {}), "recursion_limit": own if own < _UNLIMITED else RECURSION_LIMIT}
        if isinstance(graph.checkpointer, BaseCheckpointSaver):
            twin.checkpointer = self._checkpointers.setdefault(id(graph.checkpointer), InMemorySaver())
        if graph.store is not None:
            twin.store = self._stores.setdefault(id(graph.store), _copy_store(graph.store))
        return twin


def _copy_store(real: BaseStore) -> InMemoryStore:
    """The episode's own store, with the items of an in-memory one; to read another would reach a server.

    It has no embeddings, so that a search by a query finds the oldest items.
    """
    own = InMemoryStore()
    if isinstance(real, InMemoryStore):
        own._data.update({namespace: dict(items) for namespace, items in real._data.items()})
    return own


def simulated(
    graph: Invocable,
    *,
    policy: BaseChatModel,
    environment: Environment,
    task: Task | None = None,
    **options: Unpack[EpisodeOptions],
) -> SimulatedEpisode:
    """Run `graph` in the dream: `with simulated(...) as episode: state = episode.invoke(payload)`, or `async with`.

    Inside the block every run of the graph, by `episode.invoke` or by its own methods, has its chat models answered by
    `policy`, its tool calls by `environment` (an action is `render_call`'s text), and nothing real touched: the guard raises
    `RealAccessBlocked` there, and again at the block's end if it was swallowed. What the environment raises ends the block too.
    Afterwards `episode` holds `steps`, `calls`, `blocked` and `truncated`.

    Args:
        graph: A compiled graph, or any object with `invoke` that runs one.
        policy: The chat model that is trained; tools reach it in OpenAI's form.
        environment: Plays the tools; one instance per concurrent episode.
        task: What the environment is reset to; None if it has been.
        route: The nodes whose models the policy answers for (`Route`); the others keep their production models. Default: all.
        pass_through: Names of tools that really run, under the guard. State tools and sub-agents do by themselves.
        allow: Hosts and paths that may be touched.
        respond: Answers interrupts. Default: every action is approved, and any other question is put to the environment's user,
            or answered "yes" without one.
        context: The run's context, for a graph with a `context_schema`: a value, or a function of the task.
        next_payload: (last state, user's reply) -> the graph's next input. Default: the reply as a human message, behind the
            earlier ones where no checkpointer keeps the thread.
        read_message: The agent's message in a state of the graph. Default: the last message's text.
        max_turns: Replies of the user, after which the episode is truncated.

    Raises `ConfigurationError` for a missing environment, for unknown names, and for options outside their range.
    """
    if environment is None:
        raise ConfigurationError("simulated(environment=None): a dream needs an Environment that plays the tools")
    check_names(graph, options.get("route"), options.get("pass_through", ()))
    return SimulatedEpisode(graph, policy=policy, environment=environment, task=task, **options)


# --- patching ---------------------------------------------------------------------------------------------------------------


def install_answering() -> None:
    """Patch all chat-model and tool classes known by now, anew in each run. Production needs no more."""
    patch_models()
    patch_tools()
    dispatch(Serializable, "__init__", _patch_new_class)


def install_episode(*, guarded: bool) -> None:
    """Patch what an episode needs. `guarded`: also the guard, whose audit hook stays for the life of the process."""
    install_answering()
    patch_graphs()
    patch_threads()
    if guarded:
        install_guard()


def _patch_new_class(episode: object, original: Method, created: Any, args: Args, kwargs: Kwargs) -> None:
    """Patch the class of an object that an episode creates: it may be younger."""
    original(created, *args, **kwargs)
    if isinstance(created, BaseChatModel | BaseTool):
        for cls in type(created).__mro__:
            if issubclass(cls, BaseChatModel):
                patch_model_class(cls)
            elif issubclass(cls, BaseTool):
                patch_tool_class(cls)


def patch_graphs() -> None:
    """Patch every graph class known by now."""
    for cls in subclasses(Pregel):
        for name in METHODS:
            if cls is Pregel or name in cls.__dict__:
                dispatch(cls, name, _on_twin, answering_episode)


def _on_twin(episode: AgentEpisode, original: Method, graph: Pregel, args: Args, kwargs: Kwargs) -> Any:
    return original(episode.twin(graph), *args, **kwargs)
