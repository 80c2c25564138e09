"""Runs an unmodified graph as an episode: the policy and the environment answer its calls."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Unpack, cast
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.load.serializable import Serializable
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.errors import GraphRecursionError
from langgraph.pregel import Pregel
from langgraph.types import Command, Interrupt

from dreamgym_lg.actions import parse_action, render_answer
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, RunStopped
from dreamgym_lg.rollout import episode_tracing
from dreamgym_lg.simulate.allow import Allow
from dreamgym_lg.simulate.context import (
    Args,
    Blocked,
    EpisodeBroken,
    Kwargs,
    Method,
    RealAccessBlocked,
    dispatch,
    in_episode,
    in_flight,
    patch_threads,
    set_var,
)
from dreamgym_lg.simulate.conversation import (
    MAX_TURNS,
    NextPayload,
    approval,
    approve,
    final_action,
    malformed_call,
    next_input,
    question,
)
from dreamgym_lg.simulate.episode import NO_CHECKPOINTER, AgentEpisode, EpisodeOptions, PendingStep, check_names
from dreamgym_lg.simulate.graphs import GraphTwins, patch_graphs
from dreamgym_lg.simulate.guard import Guard, install_guard
from dreamgym_lg.simulate.models import patch_model_class, patch_models
from dreamgym_lg.simulate.tools import patch_tool_class, patch_tools
from dreamgym_lg.types import StepResult, Task
from dreamgym_lg.user_code import raising_line

MAX_INTERRUPTS = 50
"""Interrupts of one turn after which the episode is truncated."""


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
        simulate_nodes: Sequence[str] = (),
        allow: Allow | None = None,
        respond: Callable[[Interrupt], Any] = approve,
        recursion_limit: int | None = None,
        context: Any = None,
        next_payload: NextPayload | None = None,
        read_message: Callable[[Any], str] | None = None,
        max_turns: int = MAX_TURNS,
        **arguments: Any,
    ) -> None:
        super().__init__(graph, **arguments)
        if not isinstance(max_turns, int) or max_turns < 1:
            raise ConfigurationError(f"max_turns={max_turns!r}: give the most replies of the user, at least 1")
        if recursion_limit is not None and (not isinstance(recursion_limit, int) or recursion_limit < 1):
            raise ConfigurationError(f"recursion_limit={recursion_limit!r}: give the most supersteps of a run, at least 1")
        self.guard: Guard | None = None if self._environment is None else Guard(allow or Allow(), self._add_blocked)
        self.truncated = False
        """True if cut short by the recursion limit, the environment's step limit, `max_turns` or endless interrupts."""
        self.listener = self._environment if self._environment is not None and self._environment.has_user else None
        """Replies to the agent's messages. None: the first message ends the episode."""
        self.last_action = ""
        """The message after which the user ended the conversation; "" before."""
        self.respond, self.max_turns, self._context = respond, max_turns, context
        self._next_payload, self._read_message = next_payload, read_message
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

    def stop(self, error: RunStopped) -> None:
        self.break_off(error)

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
        self._exit.enter_context(set_var(var_child_runnable_config, None))  # no subgraph of a surrounding run
        self._exit.enter_context(in_episode(self))
        self.owns_threads, self.ended = True, False
        in_flight.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exit.close()
        self.ended = True
        in_flight.discard(self)
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | asyncio.CancelledError):
            return
        if isinstance(error, Exception):  # the agent's own; the environment's are `EpisodeBroken`
            self.add_act("raised", f"{type(error).__name__}: {error}", line=raising_line(error))
        if self.blocked:  # users and asyncio's transports may have swallowed it
            raise RealAccessBlocked(*self.blocked) from error
        if self.cause is not None:
            raise self.cause

    async def __aexit__(self, *error: Any) -> None:
        self.__exit__(*error)

    # --- running ----------------------------------------------------------------------------------------------------------

    def invoke(self, payload: Any, config: RunnableConfig | None = None) -> Any:
        """Run the graph until the user ends the conversation; without a user, once. Returns the last state.

        `respond` answers interrupts; breakpoints are passed. The recursion limit and `max_turns` truncate the episode.
        """
        options = self._run_options()
        run = _Run(self, payload, config)
        with self._truncating(run):
            while True:
                if isinstance(self.graph, Pregel):
                    for chunk in self.graph.stream(run.input, run.config, stream_mode="values", **options):
                        run.add_chunk(chunk)
                    run.paused = run.may_be_paused(self.graph) and bool(self.graph.get_state(run.config).next)
                elif isinstance(self.graph, Runnable):  # around a graph, as of `with_retry`
                    run.add_chunk(self.graph.invoke(run.input, run.config, **options))
                else:
                    run.state = self.graph.invoke(run.input)
                if not run.proceed([self._reply_to(message) for message in run.messages()]):
                    break
        return run.state

    async def ainvoke(self, payload: Any, config: RunnableConfig | None = None) -> Any:
        """As `invoke`."""
        options = self._run_options()
        run = _Run(self, payload, config)
        with self._truncating(run):
            while True:
                if isinstance(self.graph, Pregel):
                    async for chunk in self.graph.astream(run.input, run.config, stream_mode="values", **options):
                        run.add_chunk(chunk)
                    run.paused = run.may_be_paused(self.graph) and bool((await self.graph.aget_state(run.config)).next)
                elif isinstance(self.graph, Runnable):
                    run.add_chunk(await self.graph.ainvoke(run.input, run.config, **options))
                elif (ainvoke := getattr(self.graph, "ainvoke", None)) is not None:
                    run.state = await ainvoke(run.input)
                else:
                    run.state = await asyncio.to_thread(self.graph.invoke, run.input)
                if not run.proceed([await self._areply_to(message) for message in run.messages()]):
                    break
        return run.state

    def _run_options(self) -> Kwargs:
        """The keyword arguments of a run: the graph's context, if there is one."""
        if self._context is None:
            return {}
        return {"context": self._context(self.task) if callable(self._context) else self._context}

    def run_config(self, config: RunnableConfig | None) -> RunnableConfig:
        """The config of a run on a thread of its own. Real graphs, too, get the dream's recursion limit."""
        limit = {"recursion_limit": self._twins.limit(self.graph)} if isinstance(self.graph, Runnable) else {}
        configurable = {"thread_id": uuid4().hex, **((config or {}).get("configurable") or {})}
        return cast(RunnableConfig, {**limit, **(config or {}), "configurable": configurable})

    def next_payload(self, first: Any, state: Any, reply: str) -> Any:
        """The graph's input after a user's reply. Args: `first`, the episode's first input; `state`, the graph's last."""
        return next_input(self.graph, first, state, reply) if self._next_payload is None else self._next_payload(state, reply)

    def read_action(self, state: Any) -> str:
        """The agent's message in a state of the graph, as an action."""
        return final_action(state) if self._read_message is None else render_answer(self._read_message(state))

    def _reply_to(self, action: str) -> str | None:
        """The user's reply to a message; None ends the conversation."""
        assert self.listener is not None
        with self._asking_environment():
            self._check_running()
            return self._record_reply(action, self.listener.step(action))

    async def _areply_to(self, action: str) -> str | None:
        """As `_reply_to`."""
        assert self.listener is not None
        with self._asking_environment():
            self._check_running()
            return self._record_reply(action, await self.listener.astep(action))

    def _record_reply(self, action: str, result: StepResult) -> str | None:
        if result.terminated or result.truncated:
            self.last, self.last_action = result, action
            return None
        decided_by = str(result.info.get("decided_by", ""))
        self._insert(PendingStep(action=action, answer=result.observation, decided_by=decided_by))
        return result.observation

    @contextlib.contextmanager
    def _truncating(self, run: "_Run") -> Iterator[None]:
        try:
            yield
            self.truncated |= run.gave_up
        except GraphRecursionError:
            self.truncated = True
        except EpisodeBroken:
            if self.last is None:
                raise
            self.truncated = self.last.truncated


class _Run:
    """A graph's run on one thread, over rounds of interrupts and user replies.

    Each round: stream with `input`, `add_chunk` each chunk, send `messages` to the user, `proceed` with the replies.
    """

    def __init__(self, episode: SimulatedEpisode, payload: Any, config: RunnableConfig | None) -> None:
        self.config = episode.run_config(config)
        self.input = self.state = self._first_input = payload
        self.gave_up = False
        """True after `MAX_INTERRUPTS` interrupts in a turn, or `max_turns` replies of a user who has not finished."""
        self.paused = False
        """True at a breakpoint (`interrupt_before`, `interrupt_after`), which the stream does not show."""
        self._episode, self._turns_left = episode, episode.max_turns
        self._interrupts: list[Interrupt] = []
        self._interrupts_in_turn = 0

    def add_chunk(self, chunk: Any) -> None:
        """Take a chunk of the stream mode "values"."""
        if isinstance(chunk, dict) and "__interrupt__" in chunk:
            self._interrupts = [*self._interrupts, *chunk["__interrupt__"]]
            chunk = {key: value for key, value in chunk.items() if key != "__interrupt__"}
            if not chunk:
                return
        self.state = chunk

    def may_be_paused(self, graph: Pregel) -> bool:
        """True if the graph may be at a breakpoint.

        Raises `ConfigurationError` for a graph that stops at interrupts or breakpoints and has no checkpointer to go on from.
        """
        if isinstance(graph.checkpointer, BaseCheckpointSaver):
            return not self._interrupts
        if self._interrupts or graph.interrupt_before_nodes or graph.interrupt_after_nodes:
            kind = "an interrupt" if self._interrupts else "a breakpoint"
            raise ConfigurationError(f"the graph stops at {kind}, and {NO_CHECKPOINTER}")
        return False

    def messages(self) -> list[str]:
        """The messages to the user: the agent's last one, or questions by interrupts. Empty at the turn limit."""
        if self._episode.listener is None or self.paused:
            return []
        waiting = [question(each) for each in self._interrupts if self._is_question(each)]
        if not self._interrupts and not malformed_call(self.state):
            waiting = [self._episode.read_action(self.state)]
            waiting = list(filter(parse_action, waiting))  # an empty message ends the conversation
        self.gave_up = len(waiting) > self._turns_left
        self._turns_left -= len(waiting)
        return [] if self.gave_up else waiting

    def proceed(self, replies: Sequence[str | None]) -> bool:
        """Set `input` for the next round; False if the run has ended."""
        interrupts, self._interrupts = self._interrupts, []
        self._interrupts_in_turn = self._interrupts_in_turn + 1 if (interrupts or self.paused) and not replies else 0
        self.gave_up |= self._interrupts_in_turn >= MAX_INTERRUPTS
        texts = [reply for reply in replies if reply is not None]
        if self.gave_up or len(texts) < len(replies) or not (interrupts or replies or self.paused):
            return False
        if self.paused:
            self.input = None  # continues after a breakpoint
        elif interrupts:
            next_text = iter(texts)
            respond = self._episode.respond
            answers = {each.id: next(next_text) if self._is_question(each) else respond(each) for each in interrupts}
            self.input = Command(resume=answers)
        else:
            self.input = self._episode.next_payload(self._first_input, self.state, texts[0])
        return True

    def _is_question(self, interrupt: Interrupt) -> bool:
        """True if the user answers an interrupt: without `respond`, and if it requests no approval."""
        can_ask = self._episode.listener is not None and self._episode.respond is approve
        return can_ask and approval(interrupt) is None


def simulated(
    graph: Invocable,
    *,
    policy: BaseChatModel,
    environment: Environment,
    task: Task | None = None,
    **options: Unpack[EpisodeOptions],
) -> SimulatedEpisode:
    """Run `graph` in the dream: `with simulated(...) as episode: state = episode.invoke(payload)`, or `async with`.

    Inside the block `policy` answers the graph's chat models and `environment` its tool calls (actions as of `render_call`).
    At a real access the guard raises `RealAccessBlocked`, again at the block's end in case that was swallowed. An error of the
    environment also ends the block. Afterwards `episode` has `steps`, `calls`, `blocked` and `truncated`.

    Args:
        graph: A compiled graph, or any object with `invoke` that runs one.
        policy: The chat model that is trained; tools reach it in OpenAI's form.
        environment: Answers the tool calls; one instance per concurrent episode.
        task: The environment is reset to it; None if that is done already.
        route: The nodes whose models the policy answers for (`Route`); the others keep their production models. Default: all.
        pass_through: Names of tools that really run, under the guard, as state tools and sub-agents always do.
        simulate_nodes: Nodes of plain code that the environment answers instead.
        allow: Hosts and paths that may be touched.
        respond: Answers interrupts. Default: requests for approval are approved, and the environment's user answers any other,
            or without a user "yes".
        recursion_limit: Supersteps of the graph after which the episode is truncated, also a real one. Default: the graph's own
            (`with_config(recursion_limit=...)`), else 50; `create_agent`'s 9,999 counts as none.
        context: The run's context, for a graph with a `context_schema`: a value, or a function of the task.
        next_payload: (last state, user's reply) -> the graph's next input. Default: the reply as a human message, behind the
            earlier ones where no checkpointer keeps the thread.
        read_message: State of the graph -> the agent's message for user and judges. Default: the last message's text, else what
            the graph returned.
        max_turns: Replies of the user after which the episode is truncated.

    Raises `ConfigurationError` for a missing environment, unknown names, and options outside their range.
    """
    if environment is None:
        raise ConfigurationError("simulated(environment=None): a dream needs an Environment that plays the tools")
    check_names(graph, options.get("route"), options.get("pass_through", ()))
    return SimulatedEpisode(graph, policy=policy, environment=environment, task=task, **options)


def install_answering() -> None:
    """Patch all chat-model and tool classes that exist now; called in each run. Production needs no more."""
    patch_models()
    patch_tools()
    dispatch(Serializable, "__init__", _patch_new_class)


def install_episode(*, guarded: bool) -> None:
    """Patch all that an episode needs. Args: `guarded`, also the guard, whose audit hook cannot be removed."""
    install_answering()
    patch_graphs()
    patch_threads()
    if guarded:
        install_guard()


def _patch_new_class(episode: object, original: Method, created: Any, args: Args, kwargs: Kwargs) -> None:
    """Patch the class of a new model or tool, which may be defined after `install_answering`."""
    original(created, *args, **kwargs)
    if isinstance(created, BaseChatModel | BaseTool):
        for cls in type(created).__mro__:
            if issubclass(cls, BaseChatModel):
                patch_model_class(cls)
            elif issubclass(cls, BaseTool):
                patch_tool_class(cls)
