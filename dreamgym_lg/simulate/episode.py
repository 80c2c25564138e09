"""Decides who answers an episode's models and tools, asks the environment, and records what happened."""

import asyncio
import contextlib
import copy
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypedDict, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel
from langgraph.types import Interrupt
from pydantic import BaseModel

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.context import ContextEpisode, EpisodeBroken, in_episode, set_var
from dreamgym_lg.simulate.conversation import NextPayload
from dreamgym_lg.simulate.guard import Allow
from dreamgym_lg.simulate.object_graph import makes_tools, reachable, run_by, runs_in_dream
from dreamgym_lg.simulate.return_types import with_returns
from dreamgym_lg.simulate.user_code import users
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Act, ActKind, Step, StepResult, Task

T = TypeVar("T")
Read = Callable[[str, bool], T]
"""(answer, exact) -> the graph's value; exact is what a tool really wrote, or an error text."""


Route = Collection[str]
"""Names of nodes and of `create_agent`'s agents whose models' calls are the policy's; a node counts with all that it runs."""


class EpisodeOptions(TypedDict, total=False):
    """The options of `simulated`, which says what each means."""

    route: Route | None
    pass_through: Sequence[str]
    allow: Allow | None
    respond: Callable[[Interrupt], Any]
    context: Any
    next_payload: NextPayload | None
    read_message: Callable[[Any], str] | None
    max_turns: int


def required_context(graph: object) -> list[str]:
    """The fields that a graph's `context_schema` requires, by name."""
    schema: Any = getattr(graph, "context_schema", None)
    if is_dataclass(schema):
        return [each.name for each in fields(schema) if each.default is MISSING and each.default_factory is MISSING]
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return [name for name, each in schema.model_fields.items() if each.is_required()]
    return sorted(getattr(schema, "__required_keys__", ()))


def check_context(graph: object, context: object) -> None:
    """Raise `ConfigurationError` where the graph's runs need a context, and none is there."""
    if context is None and (names := required_context(graph)):
        schema = graph.context_schema.__name__  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"the graph's runs need a {schema} with {', '.join(names)}: give context=, a value or a function of the task"
        )


def check_names(graph: Any, route: Route | None = None, pass_through: Collection[str] = ()) -> None:
    """Check the names in two of the options against the parts of `graph`.

    Raises `ConfigurationError` for a name in `route` that is no node of `graph` or its subgraphs and none of its agents, and
    for one in `pass_through` that is none of its tools, unless it makes tools while it runs.
    """
    parts = [] if route is None and not pass_through else list(reachable(graph))
    graphs = [part for part in parts if isinstance(part, Pregel)]
    if route is not None:
        if isinstance(route, str) or not isinstance(route, Collection) or not route:
            raise ConfigurationError(f"route={route!r}: give a list of names of nodes and agents")
        nodes = {name for each in graphs for name in each.nodes} - {"__start__"}
        nodes |= {each.name for each in graphs if each.name != "LangGraph"}
        for name in sorted(set(route) - nodes):
            raise ConfigurationError.unknown("node in route=:", name, nodes)
    tools = {part.name for part in parts if isinstance(part, BaseTool)}
    for name in sorted(set(pass_through) - tools):
        code = run_by(part for each in graphs for node in each.nodes.values() for part in (node.bound, *node.writers))
        if not any(makes_tools(function) for function in code if users(function)):
            raise ConfigurationError.unknown("tool", name, tools)


def uncached(policy: BaseChatModel) -> BaseChatModel:
    """The policy without a cache, which would replay what it said before. Raises `ConfigurationError` for no chat model."""
    if not isinstance(policy, BaseChatModel):
        raise ConfigurationError(
            f"policy={policy!r} is no chat model: give one without bound tools; load_policy(folder) reads an exported policy"
        )
    own = policy if policy.cache is False else copy.copy(policy)
    own.cache = False
    return own


@dataclass(kw_only=True)
class PendingStep:
    """A step or an act whose answer LangChain may still reword for the policy."""

    action: str
    answer: str = ""
    place: tuple[int, int] | None = None
    """Of its call, as `CallOrder.place` says."""
    valid: bool = True
    reasoning: str = ""
    decided_by: str = ""
    line: str = ""
    kind: ActKind | None = None
    """None for a step."""

    def is_before(self, other: "PendingStep") -> bool:
        """Tells if one reply asked for both, for this one first."""
        first, second = self.place, other.place
        return first is not None and second is not None and first[0] == second[0] and first[1] < second[1]


ABSENT_SECONDS = 0.25
"""How long a call waits for an earlier one of the same reply that has not begun: a person may have refused it."""


class CallOrder:
    """Lets an episode's tool calls reach the environment one at a time, those of one reply in their order.

    A call is known by its id; one without (called by hand) has no place in the order.
    """

    def __init__(self) -> None:
        self._replies, self._places = 0, dict[str, tuple[int, int]]()
        self._begun, self._ended = set[str](), set[str]()
        self._turn = threading.Lock()
        self._turn_loop: asyncio.AbstractEventLoop | None = None
        """The event loop on which a call has its turn."""

    def add_reply(self, ids: Sequence[str]) -> None:
        """Add a reply's calls, in their order. Small models use the same ids in every reply, and within one."""
        self._replies += 1
        self._begun.difference_update(ids)
        self._ended.difference_update(ids)
        self._places = self._places | {each: (self._replies, place) for place, each in reversed(list(enumerate(ids)))}

    def place(self, call_id: str | None) -> tuple[int, int] | None:
        """Number of the reply that asked for a call, and the call's number in it; of calls with one id, the first's."""
        return self._places.get(call_id or "")

    @contextlib.contextmanager
    def running(self, call_id: str | None) -> Iterator[None]:
        """The block is this call. The next call of the same reply waits for its end."""
        self._begun.add(call_id or "")
        try:
            yield
        finally:
            self._ended.add(call_id or "")

    @contextlib.contextmanager
    def turn(self, call_id: str | None) -> Iterator[None]:
        """Wait until this call may ask the environment; the block asks.

        On an event loop's thread nothing else goes on while it waits, so it waits for no other call there. Raises
        `ConfigurationError` where it would wait for ever.
        """
        loop, since = asyncio._get_running_loop(), time.monotonic()
        if loop is not None and self._turn_loop is loop:
            raise ConfigurationError(
                "a tool was called synchronously in async code while another call of the same episode waits for its answer: "
                "call `await tool.ainvoke(...)` there, or `asyncio.to_thread`"
            )
        while not (self._turn.acquire() if loop is not None else self._take_turn(call_id, since)):
            time.sleep(_pause(since))
        try:
            yield
        finally:
            self._turn.release()

    @contextlib.asynccontextmanager
    async def aturn(self, call_id: str | None) -> AsyncIterator[None]:
        """As `turn`."""
        since = time.monotonic()
        while not self._take_turn(call_id, since):
            await asyncio.sleep(_pause(since))
        self._turn_loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._turn_loop = None
            self._turn.release()

    def _take_turn(self, call_id: str | None, since: float) -> bool:
        """Take the turn, unless an earlier call of its reply may come."""
        reply, place = self.place(call_id) or (0, 0)
        earlier = {each for each, (number, before) in self._places.items() if number == reply and before < place}
        waiting = earlier - self._ended
        if waiting & self._begun or (waiting and time.monotonic() - since < ABSENT_SECONDS):
            return False
        return self._turn.acquire(blocking=False)


def _pause(since: float) -> float:
    """Seconds until the next try of a call that has waited since then."""
    return min(0.02, 0.0005 + (time.monotonic() - since) / 4)


class AgentEpisode(ContextEpisode):
    """One episode as the patched classes find it in the context of their code.

    Without an environment the tools are real: none is answered, no graph replaced by a twin, and no guard stands.
    """

    def __init__(
        self,
        graph: object,
        *,
        policy: BaseChatModel,
        environment: Environment | None,
        task: Task | None = None,
        route: Route | None = None,
        pass_through: Sequence[str] = (),
    ) -> None:
        self.graph, self.task, self.policy = graph, task, uncached(policy)
        self.call_order = CallOrder()
        self.calls: list[frozenset[str]] = []
        """The policy's calls, each by the names of the nodes and of the agent that it was made in."""
        self.cause: Exception | None = None
        """What the world raised, which ended the episode."""
        self.last: StepResult | None = None
        """The world's answer that ended the task before the agent did."""
        self._environment, self._route, self._pass_through = environment, route, frozenset(pass_through)
        self._pending: list[PendingStep] = []
        self._runs_anyway: dict[int, tuple[BaseTool, bool]] = {}
        self._tools: dict[str, dict[str, Any]] = {}
        self._prompted = False
        self._lock = threading.RLock()  # the guard's, too: what it stops may be a finaliser's doing, at any moment

    # --- who answers what -------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> Environment:
        if self._environment is None:
            raise ConfigurationError("this episode has no environment: its tools are real, and nothing asks one")
        return self._environment

    def selects(self, places: frozenset[str]) -> bool:
        """Tells if the policy answers a call made in these nodes and this agent; without a route it answers all."""
        return self._route is None or not places.isdisjoint(self._route)

    def passes(self, tool: BaseTool) -> bool:
        """Tells if this tool really runs: without an environment, every tool does."""
        return self._environment is None or self.runs_anyway(tool)

    def runs_anyway(self, tool: BaseTool) -> bool:
        """Tells if this tool runs in a dream too: passed through, a state tool, a sub-agent."""
        if tool.name in self._pass_through:
            return True
        if id(tool) not in self._runs_anyway:  # the tool is kept too: the id of a collected object is used again
            self._runs_anyway[id(tool)] = tool, bool(runs_in_dream(tool))
        return self._runs_anyway[id(tool)][1]

    def owner_of_body(self, tool: BaseTool) -> "AgentEpisode | None":
        """The episode of a running tool's body. None: the models of a real tool are its own."""
        return self if self.runs_anyway(tool) else None

    def twin(self, graph: Pregel) -> Pregel:
        """The graph as this episode runs it."""
        return graph

    # --- the environment's answers ----------------------------------------------------------------------------------------

    def play(self, action: str, call_id: str | None, read: Read[T], *, line: str) -> tuple[PendingStep, T]:
        """The environment answers an action, in the order of calls. `read` turns it into the graph's value."""
        with self._asking_environment(), self.call_order.turn(call_id):
            self._check_running()
            return self._record_result(action, call_id, self.environment.step(action), read, line)

    async def aplay(self, action: str, call_id: str | None, read: Read[T], *, line: str) -> tuple[PendingStep, T]:
        """As `play`."""
        with self._asking_environment():
            async with self.call_order.aturn(call_id):
                self._check_running()
                return self._record_result(action, call_id, await self.environment.astep(action), read, line)

    def _record_result(
        self, action: str, call_id: str | None, result: StepResult, read: Read[T], line: str
    ) -> tuple[PendingStep, T]:
        if result.terminated or result.truncated:
            self.last = result
        info = result.info
        value = read(result.observation, info.get("decided_by") == "recorded" or not info.get("valid", True))
        texts = {key: str(info.get(key, "")) for key in ("reasoning", "decided_by")}
        valid = bool(info.get("valid", True))
        return self.insert(call_id, action=action, answer=result.observation, valid=valid, line=line, **texts), value

    def _check_running(self) -> None:
        if self.last is not None:
            raise EpisodeBroken("the world has ended")

    @contextlib.contextmanager
    def _asking_environment(self) -> Iterator[None]:
        """The block is outside the episode. What it raises ends it, whatever the graph catches."""
        try:
            with in_episode(None), set_var(var_child_runnable_config, None):
                yield
        except Exception as error:
            self.cause = self.cause or error
            raise EpisodeBroken(str(error)) from error

    # --- what happened ----------------------------------------------------------------------------------------------------

    def register_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """Show the environment the policy's tools (OpenAI's form), with what they return."""
        if self._environment is not None and not {tool["function"]["name"] for tool in tools} <= self._tools.keys():
            self._tools |= {tool["function"]["name"]: tool for tool in with_returns(self.graph, tools)}
            with self._asking_environment():
                self._check_running()
                self._environment.show_tools(list(self._tools.values()))

    def register_prompt(self, text: str) -> None:
        """Show the environment the policy's first system prompt."""
        if self._environment is not None and text and not self._prompted:
            self._prompted = True
            with self._asking_environment():
                self._environment.show_prompt(text)

    def record_call(self, places: frozenset[str], messages: Sequence[BaseMessage]) -> None:
        """The policy answered a call; the tool calls it asked for get their order."""
        with self._lock:
            self.calls.append(places)
            for message in messages:
                if isinstance(message, AIMessage):
                    self.call_order.add_reply([tool_call["id"] for tool_call in message.tool_calls if tool_call["id"]])

    def add_step(self, action: str, answer: str, call_id: str | None, *, valid: bool = True, line: str) -> PendingStep:
        """Record a call that the environment did not answer, in its reply's order."""
        # in a dream no tool's own code runs: what failed before the environment, LangChain refused
        decided_by = "schema" if self._environment is not None and not valid else ""
        return self.insert(call_id, action=action, answer=answer, valid=valid, decided_by=decided_by, line=line)

    def add_act(self, kind: ActKind, text: str, call_id: str | None = None, *, line: str) -> PendingStep:
        """Record what is no step, as it begins; its `answer` may be set later."""
        return self.insert(call_id, kind=kind, action=text, line=line)

    def insert(self, call_id: str | None = None, **fields: Any) -> PendingStep:
        """Record a step or an act. Args: `fields`, those of `PendingStep`."""
        step = PendingStep(place=self.call_order.place(call_id), **fields)
        with self._lock:
            later = (n for n, other in enumerate(self._pending) if step.is_before(other))
            self._pending.insert(next(later, len(self._pending)), step)
        return step

    @property
    def acts(self) -> list[Act]:
        """The events beside the steps."""
        steps, acts = 0, list[Act]()
        for each in self._pending:
            if each.kind is None:
                steps += 1
            else:
                acts.append(Act(each.kind, steps, each.action, each.answer, each.line))
        return acts

    @property
    def steps(self) -> list[Step]:
        """The steps so far; an observation is what the policy read last. Rewards are 0: only the outcome earns."""
        steps: list[Step] = []
        observation = first_observation(self.task) if self.task else ""
        for each in self._pending:
            if each.kind is None:
                kept: Any = {name: getattr(each, name) for name in ("action", "valid", "reasoning", "decided_by", "line")}
                steps.append(Step(observation=observation, next_observation=each.answer, **kept))
                observation = each.answer
        return steps
