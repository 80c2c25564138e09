"""`shadow`: a graph in production, whose runs a policy plays again in a dream."""

import asyncio
import copy
import logging
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.language_models import BaseChatModel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.pregel import Pregel
from langgraph.types import Command

from dreamgym_lg.dream import Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.agent_world import AgentWorld
from dreamgym_lg.experiment.experience_models import policy_version
from dreamgym_lg.production.canary import Verify, check_share
from dreamgym_lg.production.log import CanaryLog, Pair, draw
from dreamgym_lg.production.recorder import Graph, RealRun, Recorder, is_langgraphs, observed
from dreamgym_lg.production.simulation import ShadowedRun, Simulation
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.simulate import Allow, Route
from dreamgym_lg.simulate.agent import production_episodes
from dreamgym_lg.simulate.object_graph import has_synchronous_middleware, nodes_with_own_threads

logger = logging.getLogger(__name__)

_shadows: "WeakKeyDictionary[type, _Shadow]" = WeakKeyDictionary()


def shadow(
    graph: Graph,
    policy: BaseChatModel,
    *,
    log: CanaryLog | str | os.PathLike[str],
    name: str | None = None,
    share: float = 1.0,
    route: Route | None = None,
    pass_through: Sequence[str] = (),
    verify: Verify | None = None,
    replay_buffer: ReplayBuffer | None = None,
    experience_model: Model | None = None,
    writes: Sequence[str] | None = None,
    simulate_nodes: Sequence[str] = (),
    allow: Allow | None = None,
    recursion_limit: int | None = None,
    most_waiting: int = 20,
) -> Graph:
    """The graph as it is, with the policy playing the same inputs in a dream.

    Production answers, with its own models and tools. After each run the policy plays it again under the guard of dreams: a
    call is answered as this very run was answered, else by a recorded answer of `replay_buffer`, else by `experience_model`.
    The log keeps whether both made the same calls, the same writing calls, and gave the same answer. Nothing that goes wrong
    there reaches production. A run that stops for a person, or that goes on after that, has no simulated side.

    Args:
        graph: The result of `StateGraph.compile` or `create_agent`.
        policy: Any chat model, without bound tools.
        log: A file, shared by all processes.
        name: Under which the log keeps it. Default: `shadow of ` and the policy's version.
        share: Of the threads (`thread_id`; without one, of the runs) that the policy plays too.
        route: As of `with_policy`.
        pass_through: Tools that really run in the simulated side too, under the guard.
        verify: (input, final state) -> success, or None if it is not known yet: judges both sides.
        replay_buffer: Real traces, whose recorded answers stand in for calls that production did not make.
        experience_model: Answers the rest. Without one, the simulated side ends at a call that nothing recorded answers.
        writes: Names of the tools that change the world. Default: as of `AgentWorld`.
        simulate_nodes, allow, recursion_limit: As of `simulated`.
        most_waiting: Number of simulated sides that may wait; further ones are dropped and counted.

    Raises `ConfigurationError` as `AgentWorld` does, since the graph has to be one that a dream can play, and for one whose
    nodes hand work to threads of their own.
    """
    check_share(share)
    options: dict[str, Any] = {"route": route, "pass_through": pass_through}
    production_episodes(graph, policy, **options)  # refuses what is no graph, model or name
    if threaded := nodes_with_own_threads(graph):
        raise ConfigurationError(
            f"the nodes {', '.join(threaded)} hand work to threads of their own: a simulated side could end those of "
            "production, and what production does there is not seen; use a canary"
        )
    options |= {"writes": writes, "simulate_nodes": simulate_nodes, "allow": allow, "recursion_limit": recursion_limit}
    world = AgentWorld(graph, isolation="guard", **options)
    buffer = replay_buffer or ReplayBuffer(":memory:")
    environments = {task.environment for task in buffer.tasks(origin="real")}
    index = world.index(buffer)
    index.refresh()  # a name in writes= that no tool has is said now
    simulation = Simulation(
        graph=graph,
        is_sync=has_synchronous_middleware(graph),
        policy=policy,
        index=index,
        model=experience_model,
        environment=environments.pop() if len(environments) == 1 else "production",
        tools=world.tools,
        options=world.options,  # type: ignore[arg-type]
        verify=verify,
    )
    version = policy_version(policy)
    name, log = name or f"shadow of {version}", log if isinstance(log, CanaryLog) else CanaryLog(log)
    log.begin(name, policy_version=version, share=0.0, alpha=0.05)
    beside = _Shadow(simulation, log, name, share, most_waiting)
    derived = observed(graph, beside)
    _shadows[type(derived)] = beside
    return derived


def wait_for_shadows(graph: Pregel, timeout: float | None = None) -> bool:
    """Wait for the simulated sides of this process; False if time is up.

    Where the graph runs asynchronously: `await asyncio.to_thread(wait_for_shadows, graph)`.
    """
    if (beside := _shadows.get(type(graph))) is None:
        raise ConfigurationError(f"{type(graph).__name__} is no graph that shadow() returned")
    return beside.wait(timeout)


class _Shadow:
    """Plays the simulated side of each real run after its end, and stores the comparison.

    The side of a run in a thread is played in a thread of its own, that of an asynchronous run as a task of the same loop:
    the clients of models are bound to their loop. A loop that ends ends its tasks.
    """

    def __init__(self, simulation: Simulation, log: CanaryLog, name: str, share: float, most_waiting: int) -> None:
        self._simulation, self._log, self._name, self._share = simulation, log, name, share
        self._copied: WeakKeyDictionary[Recorder, ShadowedRun] = WeakKeyDictionary()  # a run may be left before its end
        self._queue: queue.SimpleQueue[ShadowedRun] = queue.SimpleQueue()
        self._changed, self._most_waiting = threading.Condition(), most_waiting
        self._waiting = self._dropped = 0
        self._thread: threading.Thread | None = None
        self._tasks = set[asyncio.Future[None]]()

    def wait(self, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def begin(self, graph: Pregel, run: RealRun) -> None:
        if draw(f"{self._name}/simulated", run.thread) >= self._share:
            return
        try:
            self._copied[run.recorder] = _copy(graph, run)
        except Exception as error:
            logger.warning("a run has no simulated side, since its input cannot be copied: %s", type(error).__name__)
            self._copied[run.recorder] = ShadowedRun(thread=run.thread, unusable="failed")

    def fail(self, run: RealRun) -> None:
        pass

    def end(self, run: RealRun) -> None:
        """Let the policy play a run that has ended, unless too many wait."""
        recorder, copied = run.recorder, self._copied.pop(run.recorder, None)
        if copied is None or not recorder.ended:
            return
        if recorder.interrupted:
            copied.unusable = "interrupted"
        elif copied.unusable is None:
            copied.calls, copied.state = recorder.calls, copy.copy(recorder.state)
        with self._changed:
            if self._waiting >= self._most_waiting:
                self._dropped += 1
                return
            self._waiting += 1
            if run.loop is None:
                self._queue.put(copied)
                if self._thread is None or not self._thread.is_alive():  # none is in a fork
                    self._thread = threading.Thread(target=self._work, name="dreamgym-shadows", daemon=True)
                    self._thread.start()
        if run.loop is not None:  # in a context of its own: not a part of the run, nor of its traces
            run.loop.call_soon_threadsafe(self._begin_task, copied, context=Context())

    def _begin_task(self, run: ShadowedRun) -> None:
        task = asyncio.ensure_future(self._play(run))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        """Also of a task that its loop's end has cancelled before it began."""
        self._tasks.discard(task)
        self._done()

    async def _play(self, run: ShadowedRun) -> None:
        with _losses_logged():
            pair = await self._simulation.play(run)
            await asyncio.to_thread(self._store, pair)

    def _work(self) -> None:
        while True:
            run_lasting(self._play(self._queue.get()))
            self._done()

    def _store(self, pair: Pair) -> None:
        with self._changed:
            dropped, self._dropped = self._dropped, 0
        self._log.add_pair(self._name, pair, dropped=dropped)

    def _done(self) -> None:
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()


@contextmanager
def _losses_logged() -> Iterator[None]:
    try:
        yield
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        logger.warning("the simulated side of a run is lost: %s", type(error).__name__)


def _copy(graph: Pregel, run: RealRun) -> ShadowedRun:
    """The run as it begins, before it changes any of its input."""
    if run.input is None or isinstance(run.input, Command):
        return ShadowedRun(thread=run.thread, unusable="resumed")
    saves = isinstance(graph.checkpointer, BaseCheckpointSaver) or "__pregel_checkpointer" in run.configurable
    remembers = saves and "thread_id" in run.configurable
    before = graph.get_state({"configurable": dict(run.configurable)}).values if remembers else {}
    return ShadowedRun(
        thread=run.thread,
        payload=copy.deepcopy(_behind(graph, before, run.input) if before else run.input),
        config={"configurable": {key: value for key, value in run.configurable.items() if not is_langgraphs(key)}},
        arguments={"context": run.arguments["context"]} if "context" in run.arguments else {},
    )


def _behind(graph: Pregel, before: Mapping[str, Any], payload: Any) -> dict[str, Any]:
    """The input behind an earlier state, as one input: each key by its own reducer."""
    state = dict(before)
    for key, value in dict(payload).items():
        if key in before:
            kind: Any = graph.channels[key]
            channel = kind.from_checkpoint(before[key])
            channel.update([value])
            value = channel.get()
        state[key] = value
    return state
