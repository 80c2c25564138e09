"""Episodes for the patched classes: who answers models and tools, and what happened."""

import contextlib
import copy
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, NamedTuple, NoReturn, TypedDict, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel
from langgraph.types import Interrupt
from pydantic import BaseModel

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, RunStopped
from dreamgym_lg.simulate.allow import Allow
from dreamgym_lg.simulate.call_order import CallOrder
from dreamgym_lg.simulate.context import ContextEpisode, EpisodeBroken, in_episode, set_var
from dreamgym_lg.simulate.conversation import NextPayload
from dreamgym_lg.simulate.object_graph import makes_tools, reachable, run_by, runs_in_dream
from dreamgym_lg.simulate.return_types import with_returns
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Act, ActKind, Step, StepResult, Task
from dreamgym_lg.user_code import users

T = TypeVar("T")
Read = Callable[[str, bool, bool], T]
"""(answer, exact, valid) -> the value for the graph. Exact: the answer is recorded or an error text."""


class Call(NamedTuple):
    """A chat-model call of the agent, for a `Route`."""

    node: str
    """Name of the calling node."""
    namespace: str
    """LangGraph's checkpoint namespace, the path of nested graphs."""
    agent: str
    """`name=` of the `create_agent` that calls."""
    model: str
    streamed: bool


Route = Callable[[Call], bool] | Collection[str]
"""The calls that the policy answers: a function of the `Call`, or names of nodes and of `create_agent`'s agents. A node's name
also selects the calls of graphs that run inside of it."""


class EpisodeOptions(TypedDict, total=False):
    """Options of `simulated`, where they are described."""

    route: Route | None
    pass_through: Sequence[str]
    simulate_nodes: Sequence[str]
    allow: Allow | None
    respond: Callable[[Interrupt], Any]
    recursion_limit: int | None
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


def input_hint(graph: object) -> str:
    """Advice to give `payload=`, for a graph whose state has no `messages`; else ""."""
    keys = [name for name in getattr(graph, "channels", {}) if not name.startswith(("__", "branch:"))]
    if not keys or "messages" in keys:
        return ""
    return f"its state has {', '.join(keys)} and no `messages`: give DreamGym payload=, which makes its input of a task"


def check_context(graph: object, context: object) -> None:
    """Raise `ConfigurationError` if the graph requires a context and none is given."""
    if context is None and (names := required_context(graph)):
        schema = graph.context_schema.__name__  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"the graph's runs need a {schema} with {', '.join(names)}: give context=, a value or a function of the task; "
            "dreamgym init writes the line"
        )


NO_CHECKPOINTER = (
    "the graph has no checkpointer to go on from: give it one for training, compile(checkpointer=InMemorySaver()); LangGraph's "
    "server brings its own"
)


def check_names(graph: Any, route: Route | None = None, pass_through: Collection[str] = ()) -> None:
    """Raise `ConfigurationError` for names in `route` and `pass_through` that the graph lacks.

    A graph that creates tools while it runs may have any name in `pass_through`.
    """
    parts = [] if route is None and not pass_through else list(reachable(graph))
    graphs = [part for part in parts if isinstance(part, Pregel)]
    if route is not None and not callable(route):
        if isinstance(route, str) or not route:
            raise ConfigurationError(f"route={route!r}: give a list of names of nodes, or a function of a Call")
        nodes = {name for each in graphs for name in each.nodes} - {"__start__"}
        nodes |= {each.name for each in graphs if each.name != "LangGraph"}
        for name in sorted(set(route) - nodes):
            raise ConfigurationError.unknown("node in route=:", name, nodes)
    tools = {part.name for part in parts if isinstance(part, BaseTool)}
    for name in sorted(set(pass_through) - tools):
        code = run_by(part for each in graphs for node in each.nodes.values() for part in (node.bound, *node.writers))
        if not any(makes_tools(function) for function in code if users(function)):
            raise ConfigurationError.unknown("tool", name, tools)


@dataclass(kw_only=True)
class PendingStep:
    """A recorded step or act, whose answer LangChain may still reword for the policy."""

    action: str
    answer: str = ""
    place: tuple[int, int] | None = None
    """Of its call, as of `CallOrder.place`."""
    valid: bool = True
    reasoning: str = ""
    decided_by: str = ""
    line: str = ""
    kind: ActKind | None = None
    """None for a step."""

    def is_before(self, other: "PendingStep") -> bool:
        """True if both belong to one reply, and this one comes first."""
        first, second = self.place, other.place
        return first is not None and second is not None and first[0] == second[0] and first[1] < second[1]


def uncached(policy: BaseChatModel) -> BaseChatModel:
    """The policy without LangChain's cache, which would repeat earlier replies.

    Raises `ConfigurationError` if it is no chat model.
    """
    if not isinstance(policy, BaseChatModel):
        raise ConfigurationError(f"policy={policy!r} is no chat model: give a BaseChatModel, without bound tools")
    policy = policy if policy.cache is False else copy.copy(policy)
    policy.cache = False
    return policy


class AgentEpisode(ContextEpisode):
    """The episode that the patched classes find in the context of the running code.

    Without an environment the tools are real: none is simulated, no graph is copied, and there is no guard.

    Args: `parent`, the episode of a graph around this one, whose policy answers what this `route` leaves.
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
        parent: "AgentEpisode | None" = None,
    ) -> None:
        self.graph, self.task, self.policy, self._parent = graph, task, uncached(policy), parent
        self.call_order = CallOrder()
        self.calls: list[Call] = []
        self.cause: Exception | None = None
        """The error of environment or policy that ended the episode."""
        self.last: StepResult | None = None
        """The environment's answer that ended the task, if one did."""
        self._environment, self._route, self._pass_through = environment, route, frozenset(pass_through)
        self._pending: list[PendingStep] = []
        self._runs_anyway: dict[int, tuple[BaseTool, bool]] = {}
        self._tools: dict[str, dict[str, Any]] = {}
        self.prompts: dict[str, str] = {}
        """The policy's first system prompt by node."""
        self._lock = threading.RLock()  # re-entrant: the guard may record a finaliser's access at any moment

    # --- who answers what -------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> Environment:
        if self._environment is None:
            raise ConfigurationError("this episode has no environment: its tools are real, and nothing asks one")
        return self._environment

    def policy_for(self, call: Call) -> BaseChatModel | None:
        """The policy that answers this call; None for a call that no route selects."""
        if self._selects(call):
            return self.policy
        return self._parent.policy_for(call) if self._parent is not None else None

    def is_policy(self, model: BaseChatModel) -> bool:
        """True for the policy, and that of a graph around."""
        return model is self.policy or (self._parent is not None and self._parent.is_policy(model))

    def _selects(self, call: Call) -> bool:
        if self._route is None or callable(self._route):
            return self._route is None or bool(self._route(call))
        path = (part.partition(":")[0] for part in call.namespace.split("|"))
        return not {call.node, call.agent, *path}.isdisjoint(self._route)

    def passes(self, tool: BaseTool) -> bool:
        """True if this tool really runs, as all do without an environment."""
        return self._environment is None or self.runs_anyway(tool)

    def runs_anyway(self, tool: BaseTool) -> bool:
        """True for tools that also run in a dream: passed through, state tools, sub-agents."""
        if tool.name in self._pass_through:
            return True
        if id(tool) not in self._runs_anyway:  # keeps the tool alive: the id of a collected object is used again
            self._runs_anyway[id(tool)] = tool, bool(runs_in_dream(tool))
        return self._runs_anyway[id(tool)][1]

    def owner_of_body(self, tool: BaseTool) -> "AgentEpisode | None":
        """The episode to which a running tool's function belongs. None: its models are its own."""
        return self if self.runs_anyway(tool) else None

    def twin(self, graph: Pregel) -> Pregel:
        """The graph as this episode runs it."""
        return graph

    # --- the environment's answers ----------------------------------------------------------------------------------------

    def play(self, action: str, call_id: str | None, read: Read[T], *, line: str) -> tuple[PendingStep, T]:
        """Let the environment answer an action, in the order of calls. `read` converts the answer."""
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
        answer, place, valid = result.observation, self.call_order.place(call_id), bool(result.info.get("valid", True))
        reasoning, by = (str(result.info.get(key, "")) for key in ("reasoning", "decided_by"))
        value = read(answer, by == "recorded" or not valid, valid)
        step = PendingStep(
            action=action, answer=answer, place=place, valid=valid, reasoning=reasoning, decided_by=by, line=line
        )
        return self._insert(step), value

    def _check_running(self) -> None:
        if self.last is not None:
            raise EpisodeBroken("the environment has ended the episode")

    @contextlib.contextmanager
    def _asking_environment(self) -> Iterator[None]:
        """The block runs outside of the episode. An error in it ends the episode, even if the graph catches it."""
        try:
            with in_episode(None), set_var(var_child_runnable_config, None):
                yield
        except Exception as error:
            self.break_off(error)

    def break_off(self, error: Exception) -> NoReturn:
        """End the episode with this error as its cause, even if the graph catches errors."""
        self.cause = self.cause or error
        raise EpisodeBroken(str(error)) from error

    def stop(self, error: RunStopped) -> None:
        """Called with an error of the policy after which no episode can go on. In production the agent handles it."""

    # --- what happened ----------------------------------------------------------------------------------------------------

    def register_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """Show the environment the policy's tools (OpenAI's form), with their return schemas."""
        if self._environment is None or {tool["function"]["name"] for tool in tools} <= self._tools.keys():
            return
        self._tools |= {tool["function"]["name"]: tool for tool in with_returns(self.graph, tools)}
        with self._asking_environment():
            self._check_running()
            self._environment.show_tools(list(self._tools.values()))

    def register_prompt(self, text: str, node: str) -> None:
        """Keep each node's first system prompt, and show the environment the first of all."""
        if not text:
            return
        is_first = not self.prompts
        self.prompts.setdefault(node, text)
        if is_first and self._environment is not None:
            with self._asking_environment():
                self._environment.show_prompt(text)

    def record_call(self, call: Call, messages: Sequence[BaseMessage]) -> None:
        """Record that the policy answered a call, and the order of the reply's tool calls."""
        with self._lock:
            self.calls.append(call)
            for message in messages:
                if isinstance(message, AIMessage):
                    self.call_order.add_reply([tool_call["id"] for tool_call in message.tool_calls if tool_call["id"]])

    def add_step(self, action: str, answer: str, call_id: str | None, *, valid: bool = True, line: str) -> PendingStep:
        """Record a tool call that the environment did not answer, in its reply's order."""
        # in a dream, an invalid call that did not reach the environment was refused by LangChain
        decided_by = "schema" if self._environment is not None and not valid else ""
        place = self.call_order.place(call_id)
        step = PendingStep(action=action, answer=answer, place=place, valid=valid, decided_by=decided_by, line=line)
        return self._insert(step)

    def add_act(self, kind: ActKind, text: str, call_id: str | None = None, *, line: str) -> PendingStep:
        """Record an act at its beginning; its `answer` may be set later."""
        return self._insert(PendingStep(kind=kind, action=text, place=self.call_order.place(call_id), line=line))

    def _insert(self, step: PendingStep) -> PendingStep:
        with self._lock:
            later = (n for n, other in enumerate(self._pending) if step.is_before(other))
            self._pending.insert(next(later, len(self._pending)), step)
        return step

    @property
    def acts(self) -> list[Act]:
        """The recorded events that are no steps."""
        steps, acts = 0, list[Act]()
        for each in self._pending:
            if each.kind is None:
                steps += 1
            else:
                acts.append(Act(each.kind, steps, each.action, each.answer, each.line))
        return acts

    @property
    def steps(self) -> list[Step]:
        """The steps so far. Each observation is the answer before it; rewards are 0 until the outcome."""
        steps: list[Step] = []
        observation = first_observation(self.task) if self.task else ""
        for each in self._pending:
            if each.kind is None:
                step = Step(
                    observation=observation,
                    action=each.action,
                    next_observation=each.answer,
                    valid=each.valid,
                    reasoning=each.reasoning,
                    decided_by=each.decided_by,
                    line=each.line,
                )
                steps.append(step)
                observation = each.answer
        return steps
