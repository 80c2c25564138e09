"""An episode of an unmodified graph: the policy answers for its models, an environment for its tools, and nothing real runs."""

import asyncio
import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.load.serializable import Serializable
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.pregel import Pregel
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command, Interrupt

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate import context
from dreamgym_lg.simulate.guard import Allow, Blocked, RealAccessBlocked
from dreamgym_lg.simulate.respond import approve
from dreamgym_lg.simulate.walk import body, runs_an_agent
from dreamgym_lg.types import Step, StepResult, Task

logger = logging.getLogger(__name__)

STATE_TOOLS = ("deepagents.", "langchain.agents.middleware.todo")
"""Modules whose tools do nothing but change the graph's state: they really run."""

MAX_INTERRUPTS = 50


class Call(NamedTuple):
    """A production model's call, as a selector sees it."""

    node: str
    """Name of the graph's node that made it."""
    namespace: str
    """LangGraph's checkpoint namespace: the path of nested graphs."""
    agent: str
    """`name=` of the `create_agent` that made it."""
    model: str
    streamed: bool


class EpisodeBroken(BaseException):
    """Ends a graph whose world has failed, past every `except Exception`; the episode's `cause` says why."""


class Episode:
    """`with simulated(graph, policy=..., environment=...) as episode:`; see `simulated`."""

    def __init__(
        self, graph: Any, *, policy: BaseChatModel, environment: Environment | None, task: Task | None = None,
        select: Callable[[Call], bool] | None = None, pass_through: Sequence[str] = (), simulate_nodes: Sequence[str] = (),
        allow: Allow | None = None, respond: Callable[[Interrupt], Any] = approve, recursion_limit: int = 50,
    ) -> None:  # fmt: skip
        if not isinstance(policy, BaseChatModel):
            raise ConfigurationError(f"policy={policy!r} is no chat model: give a BaseChatModel, without bound tools")
        self.graph, self.task, self.respond, self.recursion_limit = graph, task, respond, recursion_limit
        self.policy = policy if policy.cache is False else copy.copy(policy)
        self.policy.cache = False  # a global LLM cache would replay what the policy said before
        self._world, self._select, self._pass = environment, select, frozenset(pass_through)
        self.simulate_nodes, self.allow = frozenset(simulate_nodes), allow or Allow()
        self.real = environment is None
        self.guarded = not self.real
        self.steps: list[Step] = []
        self.calls: list[Call] = []
        self.blocked: list[Blocked] = []
        self.truncated = False
        self.cause: Exception | None = None
        self.asking = threading.Lock()
        self.checkpointers: dict[int, InMemorySaver] = {}
        self.stores: dict[int, InMemoryStore] = {}
        self._observation = str(task.metadata.get("observation", task.instruction)) if task else ""
        self._twins: dict[int, tuple[Pregel, Pregel]] = {}
        self._are_twins: set[int] = set()
        self._tools: dict[str, dict[str, Any]] = {}
        self._earlier: dict[str, tuple[str, ...]] = {}
        self._begun: dict[str, float] = {}
        self._ended: set[str] = set()
        self._lock = threading.Lock()
        self._exit = contextlib.ExitStack()

    # --- who answers what -------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> Environment:
        assert self._world is not None, "asked for tools that pass through"
        return self._world

    def selects(self, call: Call) -> bool:
        return self._select is None or self._select(call)

    def passes(self, tool: BaseTool) -> bool:
        """Whether this tool really runs: without an environment, every tool does."""
        return self.real or self.runs_anyway(tool)

    def runs_anyway(self, tool: BaseTool) -> bool:
        """Whether this tool is no part of the world: named so, a state tool, or a sub-agent."""
        if tool.name in self._pass:
            return True
        return str(getattr(body(tool), "__module__", "")).startswith(STATE_TOOLS) or runs_an_agent(tool)

    def twin(self, graph: Pregel) -> Pregel:
        """The graph as this episode runs it."""
        from dreamgym_lg.simulate.graphs import create_twin

        if self.real or id(graph) in self._are_twins:
            return graph
        with self._lock:
            if id(graph) not in self._twins:
                twin = create_twin(self, graph)
                self._twins[id(graph)] = graph, twin  # both kept: an id is reused once its object is gone
                self._are_twins.add(id(twin))
            return self._twins[id(graph)][1]

    # --- what happened ----------------------------------------------------------------------------------------------------

    def told_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """The policy was shown these tools (OpenAI's form): the world is told what can be called."""
        new = {tool["function"]["name"]: tool for tool in tools} if tools else {}
        if self._world is not None and not new.keys() <= self._tools.keys():
            self._tools |= new
            self._world.show_tools(list(self._tools.values()))

    def answered(self, call: Call, messages: Sequence[BaseMessage]) -> None:
        with self._lock:
            self.calls.append(call)
            for message in messages:
                ids = [str(asked["id"]) for asked in message.tool_calls] if isinstance(message, AIMessage) else []
                self._earlier |= {asked: tuple(ids[:i]) for i, asked in enumerate(ids)}

    def stepped(self, action: str, result: StepResult) -> None:
        with self._lock:
            self.steps.append(
                Step(
                    observation=self._observation, action=action, next_observation=result.observation,
                    valid=result.info.get("valid", True), reasoning=result.info.get("reasoning", ""),
                )
            )  # fmt: skip
            self._observation = result.observation

    @contextlib.contextmanager
    def world(self) -> Iterator[None]:
        """The block is the world's: outside of the episode; its failure ends the episode, whatever the graph catches."""
        try:
            with context.entered(None):
                yield
        except Exception as error:
            self.cause = self.cause or error
            raise EpisodeBroken(str(error)) from error

    # --- parallel calls, in their order -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def tool_call(self, call_id: str | None) -> Iterator[None]:
        """This call is at work; the next of the same reply waits for its end."""
        self._begun.setdefault(str(call_id), time.monotonic())
        try:
            yield
        finally:
            self._ended.add(str(call_id))

    def next_is(self, call_id: str | None) -> bool:
        """Whether every earlier call of the same reply is answered, or will not come."""
        from dreamgym_lg.simulate.tools import ABSENT_SECONDS

        if call_id is None:
            return True
        since = time.monotonic() - self._begun.setdefault(call_id, time.monotonic())
        waiting = [earlier for earlier in self._earlier.get(call_id, ()) if earlier not in self._ended]
        return all(earlier not in self._begun for earlier in waiting) and (not waiting or since > ABSENT_SECONDS)

    # --- running -----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Episode":
        install()
        if self.task is not None and self._world is not None:
            self._world.reset(self.task)
        return self._entered()

    async def __aenter__(self) -> "Episode":
        install()
        if self.task is not None and self._world is not None:
            await self._world.areset(self.task)
        return self._entered()

    def _entered(self) -> "Episode":
        from langsmith.run_helpers import tracing_context

        if self.guarded:  # a dream is not to be reported as production's doing
            self._exit.enter_context(tracing_context(enabled=False))
        self._exit.enter_context(context.entered(self))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._exit.close()
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | asyncio.CancelledError):
            return
        if self.blocked:  # asyncio's own transports swallow it, as users do
            raise RealAccessBlocked(*self.blocked) from error
        if self.cause is not None:
            raise self.cause

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.__exit__(kind, error, trace)

    def invoke(self, payload: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the graph to its end, its interrupts answered by `respond`. Reaching the recursion limit truncates the episode.

        Returns the graph's last state, or its result if it is no graph but an object with `invoke`.
        """
        run = _Run(self, payload, config)
        with self._truncating():
            if not isinstance(self.graph, Pregel):
                return self.graph.invoke(payload)
            while run.goes_on():
                for chunk in self.graph.stream(run.given, run.config, stream_mode="values", **kwargs):
                    run.saw(chunk)
        return run.state

    async def ainvoke(self, payload: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As `invoke`."""
        run = _Run(self, payload, config)
        with self._truncating():
            if not hasattr(self.graph, "ainvoke"):
                return await asyncio.to_thread(self.graph.invoke, payload)
            if not isinstance(self.graph, Pregel):
                return await self.graph.ainvoke(payload)
            while run.goes_on():
                async for chunk in self.graph.astream(run.given, run.config, stream_mode="values", **kwargs):
                    run.saw(chunk)
        return run.state

    @contextlib.contextmanager
    def _truncating(self) -> Iterator[None]:
        try:
            yield
        except GraphRecursionError:
            self.truncated = True


class _Run:
    """One run of a graph over its interrupts."""

    def __init__(self, episode: Episode, payload: Any, config: RunnableConfig | None) -> None:
        configurable = {"thread_id": uuid4().hex, **((config or {}).get("configurable") or {})}
        self.config: Any = {**(config or {}), "configurable": configurable}
        self.episode, self.given, self.state, self.rounds = episode, payload, payload, 0
        self.interrupts: list[Interrupt] = []

    def saw(self, chunk: Any) -> None:
        if isinstance(chunk, dict) and "__interrupt__" in chunk:
            self.interrupts.extend(chunk["__interrupt__"])
            chunk = {key: value for key, value in chunk.items() if key != "__interrupt__"}
            if not chunk:
                return
        self.state = chunk

    def goes_on(self) -> bool:
        """Whether there is something to run: the payload first, then the answers to what interrupted it."""
        self.rounds += 1
        if self.rounds == 1:
            return True
        if self.rounds > MAX_INTERRUPTS:
            self.episode.truncated = True
            return False
        asked, self.interrupts = self.interrupts, []
        self.given = Command(resume={interrupt.id: self.episode.respond(interrupt) for interrupt in asked})
        return bool(asked)


def install() -> None:
    """Teach all classes known by now; called at each episode's start, as users import more of them at any time."""
    from dreamgym_lg.simulate import graphs, guard, models, threads, tools

    for part in (models, tools, graphs, threads, guard):
        part.install()
    context.dispatch(Serializable, "__init__", _made)


def _made(episode: Episode, original: context.Method, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Something is made during an episode: its class may be younger than the episode's start."""
    from dreamgym_lg.simulate import models, tools

    original(made, *args, **kwargs)
    if isinstance(made, BaseChatModel | BaseTool):
        for cls in type(made).__mro__:
            if issubclass(cls, BaseChatModel | BaseTool):
                (models if issubclass(cls, BaseChatModel) else tools).teach(cls)
