"""An episode of an unmodified graph: the policy answers for its models, an environment for its tools, and nothing real runs."""

import asyncio
import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.load.serializable import Serializable
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.pregel import Pregel
from langgraph.store.memory import InMemoryStore
from langgraph.types import Interrupt
from langsmith.run_helpers import tracing_context

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate import context
from dreamgym_lg.simulate.call_order import Played, Turns
from dreamgym_lg.simulate.guard.guard import Allow, Blocked, RealAccessBlocked
from dreamgym_lg.simulate.interrupts import Run, approve
from dreamgym_lg.simulate.object_graph import body, runs_an_agent
from dreamgym_lg.types import Step, StepResult, Task

T = TypeVar("T")

STATE_TOOLS = ("deepagents.", "langchain.agents.middleware.todo")
"""Modules whose tools do nothing but change the graph's state: they really run."""


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
    """Ends a graph whose world has failed or ended, past every `except Exception`; `cause` or `last` of the episode say why."""


class Episode:
    """`with simulated(graph, policy=..., environment=...) as episode:`; see `simulated`."""

    def __init__(
        self, graph: Any, *, policy: BaseChatModel, environment: Environment | None, task: Task | None = None,
        select: Callable[[Call], bool] | None = None, pass_through: Sequence[str] = (), simulate_nodes: Sequence[str] = (),
        allow: Allow | None = None, respond: Callable[[Interrupt], Any] = approve, recursion_limit: int = 50,
    ) -> None:  # fmt: skip
        if not isinstance(policy, BaseChatModel):
            raise ConfigurationError(f"policy={policy!r} is no chat model: give a BaseChatModel, without bound tools")
        if not isinstance(recursion_limit, int) or recursion_limit < 1:
            raise ConfigurationError(f"recursion_limit={recursion_limit!r}: give the most supersteps of a run, at least 1")
        self.graph, self.task, self.respond, self.recursion_limit = graph, task, respond, recursion_limit
        self.policy = policy if policy.cache is False else copy.copy(policy)
        self.policy.cache = False  # a global LLM cache would replay what the policy said before
        self._world, self._select, self._pass = environment, select, frozenset(pass_through)
        self.simulate_nodes, self.allow = frozenset(simulate_nodes), allow or Allow()
        self.real = environment is None
        self.guarded = not self.real
        self.turns = Turns()
        self.calls: list[Call] = []
        self.blocked: list[Blocked] = []
        self.truncated = False
        self.cause: Exception | None = None
        self.last: StepResult | None = None
        """The world's answer that ended the task before the agent did."""
        self.checkpointers: dict[int, InMemorySaver] = {}
        self.stores: dict[int, InMemoryStore] = {}
        self._played: list[Played] = []
        self._part: dict[int, tuple[BaseTool, bool]] = {}
        self._twins: dict[int, tuple[Pregel, Pregel]] = {}
        self._are_twins: set[int] = set()
        self._tools: dict[str, dict[str, Any]] = {}
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
        if id(tool) not in self._part:
            of_state = str(getattr(body(tool), "__module__", "")).startswith(STATE_TOOLS)
            self._part[id(tool)] = tool, of_state or runs_an_agent(tool)
        return self._part[id(tool)][1]

    def inside(self, tool: BaseTool) -> "Episode | None":
        """To whom the body of a tool that really runs belongs: a real tool's own models are no part of the policy."""
        return self if self.runs_anyway(tool) else None

    def twin(self, graph: Pregel) -> Pregel:
        """The graph as this episode runs it."""
        from dreamgym_lg.simulate.graphs import create_twin

        if self.real or id(graph) in self._are_twins:
            return graph
        with self._lock:
            if id(graph) not in self._twins:
                twin = create_twin(self, graph)
                self._twins[id(graph)] = graph, twin  # both kept, as all that is known by id: ids are used again
                self._are_twins.add(id(twin))
            return self._twins[id(graph)][1]

    # --- what happened ----------------------------------------------------------------------------------------------------

    def told_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """The policy was shown these tools (OpenAI's form): the world is told what can be called."""
        new = {tool["function"]["name"]: tool for tool in tools} if tools else {}
        if self._world is not None and not new.keys() <= self._tools.keys():
            self._tools |= new
            with self._world_at_work():
                self._goes_on()
                self._world.show_tools(list(self._tools.values()))

    def answered(self, call: Call, messages: Sequence[BaseMessage]) -> None:
        with self._lock:
            self.calls.append(call)
            for message in messages:
                if isinstance(message, AIMessage):
                    self.turns.replied([asked["id"] for asked in message.tool_calls if asked["id"]])

    def note(self, action: str, answer: str, call_id: str | None, *, valid: bool = True, reasoning: str = "") -> Played:
        """Note a step behind all others, but before later calls of the same reply that were quicker."""
        played = Played(action, answer, self.turns.place(call_id), valid, reasoning)
        with self._lock:
            later = (n for n, other in enumerate(self._played) if played.is_before(other))
            self._played.insert(next(later, len(self._played)), played)
        return played

    @property
    def steps(self) -> list[Step]:
        """What was played so far; an observation is what the policy read last. Rewards are the outcome's."""
        steps: list[Step] = []
        seen = str(self.task.metadata.get("observation", self.task.instruction)) if self.task else ""
        for each in self._played:
            told, seen = seen, each.answer
            steps.append(
                Step(observation=told, action=each.action, next_observation=seen, valid=each.valid, reasoning=each.reasoning)
            )
        return steps

    # --- the world's answers ------------------------------------------------------------------------------------------------

    def play(self, action: str, call_id: str | None, read: Callable[[str], T]) -> tuple[Played, T]:
        """The world answers an action, when it is its turn; `read` makes of its answer what the graph gets."""
        with self._world_at_work(), self.turns.taken(call_id):
            self._goes_on()
            return self._answered(action, call_id, self.environment.step(action), read)

    async def aplay(self, action: str, call_id: str | None, read: Callable[[str], T]) -> tuple[Played, T]:
        """As `play`."""
        with self._world_at_work():
            async with self.turns.ataken(call_id):
                self._goes_on()
                return self._answered(action, call_id, await self.environment.astep(action), read)

    def _answered(self, action: str, call_id: str | None, result: StepResult, read: Callable[[str], T]) -> tuple[Played, T]:
        told = {"valid": bool(result.info.get("valid", True)), "reasoning": str(result.info.get("reasoning", ""))}
        if result.terminated or result.truncated:
            self.last = result
        value = read(result.observation)
        return self.note(action, result.observation, call_id, **told), value  # type: ignore[arg-type]

    def _goes_on(self) -> None:
        if self.last is not None:
            raise EpisodeBroken("the world has ended")

    @contextlib.contextmanager
    def _world_at_work(self) -> Iterator[None]:
        """The block is the world's: outside of the episode; its failure ends the episode, whatever the graph catches."""
        try:
            with context.entered(None), context.held(var_child_runnable_config, None):
                yield
        except Exception as error:
            self.cause = self.cause or error
            raise EpisodeBroken(str(error)) from error

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
        if self.guarded:  # a dream is not to be reported as production's doing
            self._exit.enter_context(tracing_context(enabled=False))
        self._exit.enter_context(context.held(var_child_runnable_config, None))  # no subgraph of the run it is played in
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
        run = Run(payload, config, self.respond)
        with self._truncating():
            if not isinstance(self.graph, Pregel):
                return self.graph.invoke(payload)
            while run.goes_on():
                for chunk in self.graph.stream(run.given, run.config, stream_mode="values", **kwargs):
                    run.saw(chunk)
            self.truncated |= run.given_up
        return run.state

    async def ainvoke(self, payload: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As `invoke`."""
        run = Run(payload, config, self.respond)
        with self._truncating():
            if not hasattr(self.graph, "ainvoke"):
                return await asyncio.to_thread(self.graph.invoke, payload)
            if not isinstance(self.graph, Pregel):
                return await self.graph.ainvoke(payload)
            while run.goes_on():
                async for chunk in self.graph.astream(run.given, run.config, stream_mode="values", **kwargs):
                    run.saw(chunk)
            self.truncated |= run.given_up
        return run.state

    @contextlib.contextmanager
    def _truncating(self) -> Iterator[None]:
        try:
            yield
        except GraphRecursionError:
            self.truncated = True
        except EpisodeBroken:
            if self.last is None:
                raise
            self.truncated = self.last.truncated


def install() -> None:
    """Teach all classes known by now; called at each episode's start, as users import more of them at any time."""
    from dreamgym_lg.simulate import graphs, models, tools
    from dreamgym_lg.simulate.guard import guard, threads

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
