"""Runs an unmodified graph as an episode: policy and environment answer, nothing real runs."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Unpack
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.load.serializable import Serializable
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langgraph.errors import GraphRecursionError
from langgraph.pregel import Pregel
from langgraph.types import Command, Interrupt

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.rollout import episode_tracing
from dreamgym_lg.simulate.context import Blocked, EpisodeBroken, RealAccessBlocked, in_episode, set_var
from dreamgym_lg.simulate.dispatch import Args, Kwargs, Method, dispatch
from dreamgym_lg.simulate.episode import AgentEpisode, EpisodeOptions, check_names
from dreamgym_lg.simulate.graphs import GraphTwins, patch_graphs
from dreamgym_lg.simulate.guard import Allow, Guard, install_guard
from dreamgym_lg.simulate.models import patch_model_class, patch_models
from dreamgym_lg.simulate.ownership import patch_threads
from dreamgym_lg.simulate.tools import patch_tool_class, patch_tools
from dreamgym_lg.simulate.user_code import raising_line
from dreamgym_lg.types import Task

MAX_INTERRUPTS = 50


class Invocable(Protocol):
    """A compiled graph, or any object whose `invoke` runs one."""

    def invoke(self, payload: Any, /) -> Any: ...


def approve(interrupt: Interrupt) -> Any:
    """Approve every action of LangChain's human-in-the-loop middleware; answer anything else with "yes"."""
    value = interrupt.value
    if isinstance(value, Mapping) and "action_requests" in value:
        return {"decisions": [{"type": "approve"} for _ in value["action_requests"]]}
    if isinstance(value, list) and value and all(isinstance(part, Mapping) and "action_request" in part for part in value):
        return [{"type": "accept"} for _ in value]
    return "yes"


class SimulatedEpisode(AgentEpisode):
    """An episode that runs its graph, under a guard in a dream. Args: as of `simulated` and `AgentEpisode`."""

    graph: Invocable

    def __init__(
        self,
        graph: Invocable,
        *,
        simulate_nodes: Sequence[str] = (),
        allow: Allow | None = None,
        respond: Callable[[Interrupt], Any] = approve,
        recursion_limit: int | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(graph, **arguments)
        if recursion_limit is not None and (not isinstance(recursion_limit, int) or recursion_limit < 1):
            raise ConfigurationError(f"recursion_limit={recursion_limit!r}: give the most supersteps of a run, at least 1")
        self.guard: Guard | None = None if self._environment is None else Guard(allow or Allow(), self._add_blocked)
        self.truncated = False
        """Cut short: by the recursion limit, by the world's step limit, or since interrupts never ended."""
        self._respond = respond
        self._twins = GraphTwins(self, recursion_limit=recursion_limit, simulate_nodes=simulate_nodes)
        self._exit = contextlib.ExitStack()

    @property
    def blocked(self) -> Sequence[Blocked]:
        """The real accesses that the guard stopped, oldest first."""
        return self.guard.blocked if self.guard is not None else ()

    def _add_blocked(self, blocked: Blocked) -> None:
        self.add_act("blocked", f"{blocked.event} of {blocked.target}", line=blocked.where)

    def twin(self, graph: Pregel) -> Pregel:
        return graph if self._environment is None else self._twins.twin(graph)

    def __enter__(self) -> "SimulatedEpisode":
        install_episode(guarded=self.guard is not None)
        if self.task is not None and self._environment is not None:
            self._environment.reset(self.task)
        return self._enter()

    async def __aenter__(self) -> "SimulatedEpisode":
        install_episode(guarded=self.guard is not None)
        if self.task is not None and self._environment is not None:
            await self._environment.areset(self.task)
        return self._enter()

    def _enter(self) -> "SimulatedEpisode":
        if self.guard is not None:
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
        """Run the graph to its end, its interrupts answered by `respond`. Reaching the recursion limit truncates the episode.

        Returns the graph's last state, or its result if it is no graph but an object with `invoke`.
        """
        run = _InterruptedRun(payload, config, self._respond)
        with self._truncating(run):
            if not isinstance(self.graph, Pregel):
                return self.graph.invoke(payload)
            while run.next_input():
                for chunk in self.graph.stream(run.input, run.config, stream_mode="values", **kwargs):
                    run.add_chunk(chunk)
        return run.state

    async def ainvoke(self, payload: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As `invoke`."""
        run = _InterruptedRun(payload, config, self._respond)
        with self._truncating(run):
            if not isinstance(self.graph, Pregel):
                if (ainvoke := getattr(self.graph, "ainvoke", None)) is not None:
                    return await ainvoke(payload)
                return await asyncio.to_thread(self.graph.invoke, payload)
            while run.next_input():
                async for chunk in self.graph.astream(run.input, run.config, stream_mode="values", **kwargs):
                    run.add_chunk(chunk)
        return run.state

    @contextlib.contextmanager
    def _truncating(self, run: "_InterruptedRun") -> Iterator[None]:
        try:
            yield
            self.truncated |= run.gave_up
        except GraphRecursionError:
            self.truncated = True
        except EpisodeBroken:
            if self.last is None:
                raise
            self.truncated = self.last.truncated


class _InterruptedRun:
    """One run of a graph over its interrupts. `while run.next_input()`: stream with `run.input`, add each chunk."""

    def __init__(self, payload: Any, config: RunnableConfig | None, respond: Callable[[Interrupt], Any]) -> None:
        configurable = {"thread_id": uuid4().hex, **((config or {}).get("configurable") or {})}
        self.config: RunnableConfig = {**(config or {}), "configurable": configurable}
        self.input = self.state = payload
        self.gave_up = False
        """It interrupted the run more than `MAX_INTERRUPTS` times."""
        self._respond = respond
        self._interrupts: list[Interrupt] = []
        self._rounds = 0

    def add_chunk(self, chunk: Any) -> None:
        """A chunk of the stream mode "values"."""
        if isinstance(chunk, dict) and "__interrupt__" in chunk:
            self._interrupts = [*self._interrupts, *chunk["__interrupt__"]]
            chunk = {key: value for key, value in chunk.items() if key != "__interrupt__"}
            if not chunk:
                return
        self.state = chunk

    def next_input(self) -> bool:
        """Set `input`: the payload first, then the answers to what interrupted the run. False: the run has ended."""
        interrupts, self._interrupts = self._interrupts, []
        self._rounds += 1
        if self._rounds > 1 and interrupts:
            self.gave_up = self._rounds > MAX_INTERRUPTS
            self.input = Command(resume={interrupt.id: self._respond(interrupt) for interrupt in interrupts})
        return self._rounds == 1 or (bool(interrupts) and not self.gave_up)


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
        simulate_nodes: Nodes of plain code that the environment answers instead.
        allow: Hosts and paths that may be touched.
        respond: Answers interrupts; by default everything is approved.
        recursion_limit: Steps of the graph, at which the episode is truncated. Default: what the graph's own config says
            (`with_config(recursion_limit=...)`), else 50; `create_agent`'s 9,999 counts as none.

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
