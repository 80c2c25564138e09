"""`canary`: a policy serves a share of the threads in production, until proven worse."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple, TypeVar
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.pregel import Pregel

from dreamgym_lg.errors import CanaryLogError, ConfigurationError
from dreamgym_lg.experiment.experience_models import policy_version
from dreamgym_lg.production.log import CanaryLog
from dreamgym_lg.simulate import Route
from dreamgym_lg.simulate.agent import derive, production_episodes
from dreamgym_lg.simulate.context import aiterate_in_episode, guarded_episode, iterate_in_episode
from dreamgym_lg.simulate.episode import AgentEpisode

logger = logging.getLogger(__name__)

Graph = TypeVar("Graph", bound=Pregel)

Verify = Callable[[Any, Any], bool | None]
"""(the run's input, the graph's final state) -> success; None: not known yet."""


def canary(
    graph: Graph,
    policy: BaseChatModel,
    *,
    log: CanaryLog | str | os.PathLike[str],
    name: str | None = None,
    share: float = 0.05,
    alpha: float = 0.05,
    route: Route | None = None,
    pass_through: Sequence[str] = (),
    verify: Verify | None = None,
) -> Graph:
    """The graph, with the policy for a share of the threads until proven worse.

    A thread is drawn once, by its `thread_id`, and stays at its side; a run without one is a thread of its own. Both sides run
    on the real tools. `CanaryLog.record_outcome` or `verify` says how a thread ended; a run that raises has failed. Outcomes
    that prove the policy worse end the canary, as `CanaryLog.stop` does: production serves every thread from the next run on.
    Once they prove it better, log and report say so. If the log cannot be written, production serves.

    Args:
        graph: The result of `StateGraph.compile` or `create_agent`.
        policy: Any chat model, without bound tools.
        log: A file, shared by all processes.
        name: Under which the log keeps it; another policy needs another one. Default: the policy's version.
        share: Of the threads that the policy serves. It may be changed; threads of production stay there.
        alpha: The probability of ending a canary whose policy is as good as production; the same for a wrong "better".
        route, pass_through: As of `with_policy`.
        verify: (input, final state) -> success, or None if it is not known yet: the outcome of the run's thread.

    Raises `ConfigurationError` for what is no compiled graph, unknown names, shares and alphas outside their range, and a
    name that the log holds of another policy.
    """
    if not 0 < share <= 1:
        raise ConfigurationError(f"share={share!r}: give a share of the threads, e.g. 0.05")
    if not 0 < alpha < 1:
        raise ConfigurationError(f"alpha={alpha!r}: give the probability of a wrong end, between 0 and 1, e.g. 0.05")
    episodes = production_episodes(graph, policy, route=route, pass_through=pass_through)
    log = log if isinstance(log, CanaryLog) else CanaryLog(log)
    version = policy_version(policy)
    name = name or version
    log.begin(name, policy_version=version, share=share, alpha=alpha)
    router = _Canary(episodes, log, name, verify)
    return derive(graph, router.stream, router.astream)


class _Run(NamedTuple):
    """A run of a graph in production."""

    thread: str
    """Its `thread_id`, or that of a run around it. A run without one has an id of its own."""
    input: Any
    end: "_EndListener"


class _EndListener(BaseCallbackHandler):
    """Listens for the end of one run. Nothing of the graph, its models and its tools is replaced."""

    run_inline = True
    ignore_llm = ignore_chat_model = ignore_retriever = True  # `ignore_agent` is of tools, too

    def __init__(self) -> None:
        self.state: Any = None
        """The run's output, whatever was streamed; None until it has ended."""
        self.ended = self.interrupted = False
        self._root: UUID | None = None

    def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: UUID, **_: Any) -> None:
        self._root = self._root or run_id

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        if run_id == self._root:
            self.state, self.ended = outputs, True

    def on_chain_error(self, error: BaseException, **_: Any) -> None:
        self.interrupted |= isinstance(error, GraphInterrupt)

    on_tool_error = on_chain_error


class _Canary:
    """Sends each run of a graph to production or to the policy. Runs in a dream, or of another graph's policy, are left alone.

    Beside an asynchronous run, the log is written in other threads.
    """

    def __init__(self, episodes: Callable[[Pregel], AgentEpisode], log: CanaryLog, name: str, verify: Verify | None) -> None:
        self._episodes, self._log, self._name, self._verify = episodes, log, name, verify

    def stream(self, graph: Pregel, play: Any, input: Any, config: RunnableConfig | None = None, **more: Any) -> Iterator[Any]:
        if guarded_episode() is not None:
            yield from play(input, config, **more)
            return
        run, config = _with_listener(graph, config, input)
        episode, chunks = self._begin(graph, run), play(input, config, **more)
        with self._failures_counted(run):
            yield from iterate_in_episode(chunks, episode) if episode else chunks
        if self._has_outcome(run):
            with _tolerating_verify_errors():
                if not (_has_breakpoints(graph, more) and graph.get_state(_newest(config)).next):
                    self._record(run)

    async def astream(
        self, graph: Pregel, play: Any, input: Any, config: RunnableConfig | None = None, **more: Any
    ) -> AsyncIterator[Any]:
        if guarded_episode() is not None:
            async for chunk in play(input, config, **more):
                yield chunk
            return
        run, config = _with_listener(graph, config, input)
        episode = await asyncio.to_thread(self._begin, graph, run)
        chunks = play(input, config, **more)
        with self._failures_counted(run):
            own: Any = aiterate_in_episode(chunks, episode) if episode else chunks
            async with aclosing(own):
                async for chunk in own:
                    yield chunk
        if self._has_outcome(run):
            with _tolerating_verify_errors():
                if not (_has_breakpoints(graph, more) and (await graph.aget_state(_newest(config))).next):
                    await asyncio.to_thread(self._record, run)

    def _begin(self, graph: Pregel, run: _Run) -> AgentEpisode | None:
        """The episode whose policy plays the run; None: production plays."""
        try:
            return self._episodes(graph) if self._log.choose(self._name, run.thread) == "policy" else None
        except CanaryLogError as error:
            logger.warning("production serves this run: %s", error)
            return None

    @contextmanager
    def _failures_counted(self, run: _Run) -> Iterator[None]:
        """A run that raises has failed; one that stops for a person has not."""
        try:
            yield
        except GraphBubbleUp:
            raise
        except Exception:
            with _tolerating_log_errors():
                self._log.add_error(self._name, run.thread)
            raise

    def _has_outcome(self, run: _Run) -> bool:
        """True for a run that was streamed to its end, or to a breakpoint."""
        return self._verify is not None and run.end.ended and not run.end.interrupted

    def _record(self, run: _Run) -> None:
        """Record the user's own verdict on a run that has ended."""
        assert self._verify is not None
        if (success := self._verify(run.input, run.end.state)) is not None:
            with _tolerating_log_errors():
                self._log.record_outcome(run.thread, bool(success), name=self._name)


def _has_breakpoints(graph: Pregel, options: Mapping[str, Any]) -> bool:
    """True where breakpoints can stop a run. They raise nothing that a listener hears. Args: `options`, of the run."""
    names = "interrupt_before", "interrupt_after"
    stops = any(getattr(graph, f"{name}_nodes") or options.get(name) for name in names)
    return stops and isinstance(graph.checkpointer, BaseCheckpointSaver)


def _newest(config: RunnableConfig) -> RunnableConfig:
    """The config without the checkpoint that the run began at."""
    own = config.get("configurable") or {}
    return {**config, "configurable": {name: value for name, value in own.items() if name != "checkpoint_id"}}


def _with_listener(graph: Pregel, config: RunnableConfig | None, input: Any) -> tuple[_Run, RunnableConfig]:
    """The run, and its own config with its listener among the callbacks."""
    end, config = _EndListener(), config or {}
    outer = (var_child_runnable_config.get() or {}).get("configurable") or {}
    own = {**((graph.config or {}).get("configurable") or {}), **(config.get("configurable") or {})}
    thread = own.get("thread_id", outer.get("thread_id"))
    callbacks = config.get("callbacks") or []
    if isinstance(callbacks, BaseCallbackManager):
        callbacks = callbacks.copy()
        callbacks.add_handler(end)
    else:
        callbacks = [*callbacks, end]
    return _Run(uuid4().hex if thread is None else str(thread), input, end), {**config, "callbacks": callbacks}


@contextmanager
def _tolerating_verify_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning("verify, or the checkpointer, raised %s: the run has no outcome of it", type(error).__name__)


@contextmanager
def _tolerating_log_errors() -> Iterator[None]:
    """A failure of the log is a warning, and no concern of the run."""
    try:
        yield
    except (CanaryLogError, ConfigurationError) as error:
        logger.warning("%s", error)
