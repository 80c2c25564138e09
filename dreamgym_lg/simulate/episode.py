"""An episode of an unmodified graph: the policy answers for its models, an environment for its tools, and nothing real runs."""

import asyncio
import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langgraph.errors import GraphRecursionError
from langgraph.pregel import Pregel
from langgraph.types import Interrupt

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.call_order import CallOrder, PendingStep
from dreamgym_lg.simulate.context import Call, EpisodeBroken, in_episode, set_var
from dreamgym_lg.simulate.graphs import GraphTwins
from dreamgym_lg.simulate.guard.checks import Allow
from dreamgym_lg.simulate.guard.frames import raising_line
from dreamgym_lg.simulate.guard.guard import Blocked, Guard, RealAccessBlocked
from dreamgym_lg.simulate.install import install_episode
from dreamgym_lg.simulate.interrupts import InterruptedRun, approve
from dreamgym_lg.simulate.object_graph import changes_state_only, runs_an_agent
from dreamgym_lg.simulate.return_types import with_returns
from dreamgym_lg.simulate.route import Route, goes_to_policy
from dreamgym_lg.tracing import episode_tracing
from dreamgym_lg.types import Act, ActKind, Step, StepResult, Task

T = TypeVar("T")


class Invocable(Protocol):
    """What an episode runs: a compiled graph, or any object whose `invoke` runs one."""

    def invoke(self, payload: Any, /) -> Any: ...


class SimulatedEpisode:
    """`with simulated(graph, policy=..., environment=...) as episode:`; see `simulated` for the arguments.

    Without an environment the tools are real: no tool is answered, no graph replaced by a twin, and no guard stands.
    """

    def __init__(
        self,
        graph: Invocable,
        *,
        policy: BaseChatModel,
        environment: Environment | None,
        task: Task | None = None,
        route: Route | None = None,
        pass_through: Sequence[str] = (),
        simulate_nodes: Sequence[str] = (),
        allow: Allow | None = None,
        respond: Callable[[Interrupt], Any] = approve,
        recursion_limit: int | None = None,
    ) -> None:
        if not isinstance(policy, BaseChatModel):
            raise ConfigurationError(f"policy={policy!r} is no chat model: give a BaseChatModel, without bound tools")
        if recursion_limit is not None and (not isinstance(recursion_limit, int) or recursion_limit < 1):
            raise ConfigurationError(f"recursion_limit={recursion_limit!r}: give the most supersteps of a run, at least 1")
        self.graph, self.task = graph, task
        self.policy: BaseChatModel = policy if policy.cache is False else copy.copy(policy)
        self.policy.cache = False  # a global LLM cache would replay what the policy said before
        self.guard = None if environment is None else Guard(allow or Allow(), self._add_blocked)
        self.owns_threads = False
        self.ended = False
        self.call_order = CallOrder()
        self.calls: list[Call] = []
        self.truncated = False
        """Cut short: by the recursion limit, by the world's step limit, or since interrupts never ended."""
        self.cause: Exception | None = None
        """What the world raised, which ended the episode."""
        self.last: StepResult | None = None
        """The world's answer that ended the task before the agent did."""
        self._environment, self._respond = environment, respond
        self._route, self._pass_through = route, frozenset(pass_through)
        self._twins = GraphTwins(self, recursion_limit=recursion_limit, simulate_nodes=simulate_nodes)
        self._pending: list[PendingStep] = []
        self._runs_anyway: dict[int, tuple[BaseTool, bool]] = {}
        self._tools: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()  # the guard's, too: what it stops may be a finaliser's doing, at any moment
        self._exit = contextlib.ExitStack()

    @property
    def blocked(self) -> Sequence[Blocked]:
        """The real accesses that the guard stopped, oldest first."""
        return self.guard.blocked if self.guard is not None else ()

    # --- who answers what -------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> Environment:
        if self._environment is None:
            raise ConfigurationError("this episode has no environment: its tools are real, and nothing asks one")
        return self._environment

    def selects(self, call: Call) -> bool:
        return goes_to_policy(self._route, call)

    def passes(self, tool: BaseTool) -> bool:
        """Whether this tool really runs: without an environment, every tool does."""
        return self._environment is None or self.runs_anyway(tool)

    def runs_anyway(self, tool: BaseTool) -> bool:
        """Whether this tool is no part of the world: named in `pass_through`, a state tool, or a sub-agent."""
        if tool.name in self._pass_through:
            return True
        if id(tool) not in self._runs_anyway:  # the tool is kept too: the id of a collected object is used again
            self._runs_anyway[id(tool)] = tool, changes_state_only(tool) or runs_an_agent(tool)
        return self._runs_anyway[id(tool)][1]

    def owner_of_body(self, tool: BaseTool) -> "SimulatedEpisode | None":
        """The episode that a running tool's body belongs to: a real tool's own models are no part of the policy."""
        return self if self.runs_anyway(tool) else None

    def twin(self, graph: Pregel) -> Pregel:
        """The graph as this episode runs it."""
        return graph if self._environment is None else self._twins.twin(graph)

    # --- what happened ----------------------------------------------------------------------------------------------------

    def register_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """The policy was shown these tools (OpenAI's form): the environment is told what can be called, and what it returns."""
        new = {tool["function"]["name"]: tool for tool in tools} if tools else {}
        if self._environment is not None and not new.keys() <= self._tools.keys():
            self._tools |= {tool["function"]["name"]: tool for tool in with_returns(self.graph, new.values())}
            with self._asking_environment():
                self._check_running()
                self._environment.show_tools(list(self._tools.values()))

    def record_call(self, call: Call, messages: Sequence[BaseMessage]) -> None:
        """The policy answered a call; the tool calls it asked for get their order."""
        with self._lock:
            self.calls.append(call)
            for message in messages:
                if isinstance(message, AIMessage):
                    self.call_order.add_reply([asked["id"] for asked in message.tool_calls if asked["id"]])

    def add_step(
        self,
        action: str,
        answer: str,
        call_id: str | None,
        *,
        valid: bool = True,
        reasoning: str = "",
        decided_by: str | None = None,
        line: str,
    ) -> PendingStep:
        """Record a step behind all others, but before later calls of the same reply that were quicker.

        Args: `decided_by`, as of a `Step`; None for a call that the environment was not asked about.
        """
        if decided_by is None:  # in a dream no tool's own code runs: what failed before the environment, LangChain refused
            decided_by = "schema" if self._environment is not None and not valid else ""
        place = self.call_order.place(call_id)
        return self._insert(
            PendingStep(
                action=action, answer=answer, place=place, valid=valid, reasoning=reasoning, decided_by=decided_by, line=line
            )
        )

    def add_act(self, kind: ActKind, text: str, call_id: str | None = None, *, line: str) -> PendingStep:
        """Record what is no step, as it begins; its `answer` may be set later."""
        return self._insert(PendingStep(kind=kind, action=text, place=self.call_order.place(call_id), line=line))

    def _add_blocked(self, blocked: Blocked) -> None:
        self.add_act("blocked", f"{blocked.event} of {blocked.target}", line=blocked.where)

    def _insert(self, step: PendingStep) -> PendingStep:
        with self._lock:
            later = (n for n, other in enumerate(self._pending) if step.is_before(other))
            self._pending.insert(next(later, len(self._pending)), step)
        return step

    @property
    def acts(self) -> list[Act]:
        """What happened beside the steps."""
        steps, acts = 0, list[Act]()
        for each in self._pending:
            if each.kind is None:
                steps += 1
            else:
                acts.append(Act(each.kind, steps, each.action, each.answer, each.line))
        return acts

    @property
    def steps(self) -> list[Step]:
        """What was played so far; an observation is what the policy read last. Rewards are 0: only the outcome earns."""
        steps: list[Step] = []
        following = (self.task.observation or self.task.instruction) if self.task else ""
        for each in self._pending:
            if each.kind is not None:
                continue
            observation, following = following, each.answer
            steps.append(
                Step(
                    observation=observation,
                    action=each.action,
                    next_observation=following,
                    valid=each.valid,
                    reasoning=each.reasoning,
                    decided_by=each.decided_by,
                    line=each.line,
                )
            )
        return steps

    # --- the environment's answers ----------------------------------------------------------------------------------------

    def play(self, action: str, call_id: str | None, read: Callable[[str], T], *, line: str) -> tuple[PendingStep, T]:
        """The environment answers an action, in the order of calls; `read` makes of its answer what the graph gets."""
        with self._asking_environment(), self.call_order.turn(call_id):
            self._check_running()
            return self._record_step(action, call_id, self.environment.step(action), read, line)

    async def aplay(self, action: str, call_id: str | None, read: Callable[[str], T], *, line: str) -> tuple[PendingStep, T]:
        """As `play`."""
        with self._asking_environment():
            async with self.call_order.aturn(call_id):
                self._check_running()
                return self._record_step(action, call_id, await self.environment.astep(action), read, line)

    def _record_step(
        self, action: str, call_id: str | None, result: StepResult, read: Callable[[str], T], line: str
    ) -> tuple[PendingStep, T]:
        if result.terminated or result.truncated:
            self.last = result
        value = read(result.observation)
        info = result.info
        valid, reasoning, decided_by = info.get("valid", True), info.get("reasoning", ""), info.get("decided_by", "")
        told = {"reasoning": str(reasoning), "decided_by": str(decided_by), "line": line}
        return self.add_step(action, result.observation, call_id, valid=bool(valid), **told), value

    def _check_running(self) -> None:
        if self.last is not None:
            raise EpisodeBroken("the world has ended")

    @contextlib.contextmanager
    def _asking_environment(self) -> Iterator[None]:
        """The block is outside the episode; what it raises ends the episode, whatever the graph catches."""
        try:
            with in_episode(None), set_var(var_child_runnable_config, None):
                yield
        except Exception as error:
            self.cause = self.cause or error
            raise EpisodeBroken(str(error)) from error

    # --- running ----------------------------------------------------------------------------------------------------------

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

    def invoke(self, payload: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Run the graph to its end, its interrupts answered by `respond`. Reaching the recursion limit truncates the episode.

        Returns the graph's last state, or its result if it is no graph but an object with `invoke`.
        """
        run = InterruptedRun(payload, config, self._respond)
        with self._truncating():
            if not isinstance(self.graph, Pregel):
                return self.graph.invoke(payload)
            while run.next_input():
                for chunk in self.graph.stream(run.input, run.config, stream_mode="values", **kwargs):
                    run.add_chunk(chunk)
            self.truncated |= run.given_up
        return run.state

    async def ainvoke(self, payload: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As `invoke`."""
        run = InterruptedRun(payload, config, self._respond)
        with self._truncating():
            if not isinstance(self.graph, Pregel):
                if (ainvoke := getattr(self.graph, "ainvoke", None)) is not None:
                    return await ainvoke(payload)
                return await asyncio.to_thread(self.graph.invoke, payload)
            while run.next_input():
                async for chunk in self.graph.astream(run.input, run.config, stream_mode="values", **kwargs):
                    run.add_chunk(chunk)
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
