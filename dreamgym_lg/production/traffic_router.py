"""`TrafficRouter`: sends each run of a graph to production or to the policy."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict
from uuid import uuid4

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.errors import GraphBubbleUp
from langgraph.pregel import Pregel

from dreamgym_lg.dream import Model
from dreamgym_lg.errors import CanaryLogError, ConfigurationError
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.workspace import policy_version
from dreamgym_lg.production.log import CanaryLog, Side, draw
from dreamgym_lg.production.recorder import Recorder
from dreamgym_lg.production.shadows import Shadows, is_langgraphs
from dreamgym_lg.production.simulation import Simulation, Verify, judged
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.simulate import Allow
from dreamgym_lg.simulate.agent import production_episodes
from dreamgym_lg.simulate.context import aiterate_in_episode, guarded_episode, iterate_in_episode
from dreamgym_lg.simulate.static_analysis import nodes_with_own_threads

logger = logging.getLogger(__name__)

KillSwitch = str | os.PathLike[str] | Callable[[], bool]
"""A file that turns a canary off while it exists, or a function that does while it returns True, or raises."""


class SimulationOptions(TypedDict, total=False):
    """How the side that is not chosen is simulated."""

    replay_buffer: ReplayBuffer | None
    """Real traces, whose recorded answers stand in for calls that the real side did not make."""
    experience_model: Model | None
    """Answers the rest. Without one, the simulated side ends at a call that nothing recorded answers."""
    writes: Sequence[str] | None
    """Names of the tools that change the world. Default: as of `AgentWorld`."""
    simulate_nodes: Sequence[str]
    allow: Allow | None
    recursion_limit: int | None
    most_waiting: int
    """How many simulated sides may wait; further ones are dropped and counted. Default: 100."""


class _Run(NamedTuple):
    thread: str
    """Its `thread_id`; of a run without one, an id of its own."""
    config: RunnableConfig
    """The configurable values: the graph's own, the run's, and those of a run around it."""
    recorder: Recorder


class TrafficRouter:
    """Plays the runs of one graph, each on its side. Args: as of `canary`; `options`, `route` and `pass_through`."""

    shadows: Shadows | None = None

    def __init__(
        self,
        graph: Pregel,
        policy: BaseChatModel,
        *,
        log: CanaryLog | str | os.PathLike[str],
        name: str | None,
        verify: Verify | None,
        share: float = 0.0,
        alpha: float = 0.05,
        kill_switch: KillSwitch | None = None,
        **options: Any,
    ) -> None:
        self._episodes = production_episodes(graph, policy, **options)
        self._graph, self._policy, self._options = graph, policy, options
        self._share, self._verify, self._kill_switch, self._simulated = share, verify, kill_switch, 0.0
        self._log = log if isinstance(log, CanaryLog) else CanaryLog(log)
        version = policy_version(policy)
        self._name = name or version
        self._entry: dict[str, Any] = {"policy_version": version, "share": share, "alpha": alpha}

    def simulate(self, share: float, options: SimulationOptions) -> None:
        """From now on, simulate the other side of this share of the threads.

        Raises what `AgentWorld` raises, and `ConfigurationError` for a graph that hands work to threads of its own.
        """
        if threaded := nodes_with_own_threads(self._graph):
            raise ConfigurationError(
                f"the nodes {', '.join(threaded)} hand work to threads of their own: a simulated side could end those of "
                "production, and what production does there is not seen; use a canary without shadow="
            )
        others: dict[str, Any] = dict(options)
        most_waiting, model = others.pop("most_waiting", 100), others.pop("experience_model", None)
        buffer = others.pop("replay_buffer", None) or ReplayBuffer(":memory:")
        world = AgentWorld(self._graph, isolation="guard", **self._options, **others)
        stored = {task.environment for task in buffer.tasks(origin="real")}
        index = world.index(buffer)
        index.refresh()  # a name in writes= that no tool has is said now
        simulation = Simulation(
            graph=self._graph,
            policy=self._policy,
            index=index,
            model=model,
            environment=stored.pop() if len(stored) == 1 else "production",
            tools=world.tools,
            options=world.options,  # type: ignore[arg-type]
            verify=self._verify,
        )
        self._simulated, self.shadows = share, Shadows(simulation, self._log, self._name, most_waiting=most_waiting)

    def begin(self) -> None:
        """Enter it in the log."""
        self._log.begin(self._name, **self._entry)

    # --- one run ----------------------------------------------------------------------------------------------------------

    def stream(
        self, graph: Pregel, play: Callable[..., Iterator[Any]], input: Any, config: RunnableConfig | None = None, **more: Any
    ) -> Iterator[Any]:
        """A run of `graph`, which `play` plays."""
        if guarded_episode() is not None:  # of a dream, or of another graph's policy
            yield from play(input, config, **more)
            return
        run = _watched(graph, config)
        side, snapshot = self._choose(run), None
        if shadows := self._simulates(run):
            snapshot = shadows.snapshot(graph, input, run.config, more)
        chunks = play(input, _listened(config, run.recorder), **more)
        with self._errors_counted(run):
            yield from chunks if side == "production" else iterate_in_episode(chunks, self._episodes(graph))
        success = self._record_outcome(run, input)
        if shadows and snapshot:
            shadows.submit(snapshot, side, run.recorder, success)

    async def astream(
        self,
        graph: Pregel,
        play: Callable[..., AsyncIterator[Any]],
        input: Any,
        config: RunnableConfig | None = None,
        **more: Any,
    ) -> AsyncIterator[Any]:
        """As `stream`; the log is read and written in other threads."""
        if guarded_episode() is not None:
            async for chunk in play(input, config, **more):
                yield chunk
            return
        run = _watched(graph, config)
        side, snapshot = await asyncio.to_thread(self._choose, run), None
        if shadows := self._simulates(run):
            snapshot = await shadows.asnapshot(graph, input, run.config, more)
        chunks: Any = play(input, _listened(config, run.recorder), **more)
        if side == "policy":
            chunks = aiterate_in_episode(chunks, self._episodes(graph))
        with self._errors_counted(run):
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        success = await asyncio.to_thread(self._record_outcome, run, input)
        if shadows and snapshot:
            shadows.submit(snapshot, side, run.recorder, success)

    def _simulates(self, run: _Run) -> Shadows | None:
        """The shadows, for a run whose other side is simulated."""
        return self.shadows if draw(f"{self._name}/simulated", run.thread) < self._simulated else None

    def _choose(self, run: _Run) -> Side:
        if not self._share:
            return "production"
        try:
            return self._log.choose(self._name, run.thread, switched_off=self._is_off())
        except CanaryLogError as error:
            logger.warning("production serves this run: %s", error)
            return "production"

    def _is_off(self) -> bool:
        if not callable(self._kill_switch):
            return self._kill_switch is not None and Path(self._kill_switch).exists()
        try:
            return bool(self._kill_switch())
        except Exception as error:
            logger.warning("kill_switch raised %s: the canary is off", type(error).__name__)
            return True

    @contextmanager
    def _errors_counted(self, run: _Run) -> Iterator[None]:
        """A run that raises has failed; one that stops for a person has not."""
        try:
            yield
        except GraphBubbleUp:
            raise
        except Exception:
            if self._share:
                with _failures_logged():
                    self._log.add_error(self._name, run.thread)
            raise

    def _record_outcome(self, run: _Run, payload: Any) -> bool | None:
        if not run.recorder.ended or run.recorder.interrupted:
            return None
        success = judged(self._verify, payload, run.recorder.state)
        if self._share and success is not None:
            with _failures_logged():
                self._log.record_outcome(run.thread, success, name=self._name)
        return success


def _watched(graph: Pregel, config: RunnableConfig | None) -> _Run:
    outer, own, chosen = (
        (each or {}).get("configurable") or {} for each in (var_child_runnable_config.get(), graph.config, config)
    )
    own = {**own, **chosen}
    thread = own.get("thread_id", outer.get("thread_id"))
    merged = {**{key: value for key, value in outer.items() if not is_langgraphs(key)}, **own}
    return _Run(uuid4().hex if thread is None else str(thread), {"configurable": merged}, Recorder())


def _listened(config: RunnableConfig | None, recorder: Recorder) -> RunnableConfig:
    """The run's own config, with one more listener; LangGraph merges it with the others."""
    own: RunnableConfig = config or {}
    callbacks = own.get("callbacks") or []
    if not isinstance(callbacks, BaseCallbackManager):
        return {**own, "callbacks": [*callbacks, recorder]}
    callbacks = callbacks.copy()
    callbacks.add_handler(recorder)
    return {**own, "callbacks": callbacks}


@contextmanager
def _failures_logged() -> Iterator[None]:
    """A failure of the log is a warning, and no concern of the run."""
    try:
        yield
    except (CanaryLogError, ConfigurationError) as error:
        logger.warning("%s", error)
