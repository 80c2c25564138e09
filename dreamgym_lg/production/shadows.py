"""Bounded background queue of simulated sides; its failures never reach production."""

import asyncio
import copy
import logging
import os
import queue
import threading
import weakref
from collections.abc import Mapping
from contextvars import Context
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.pregel import Pregel
from langgraph.types import Command

from dreamgym_lg.production.log import CanaryLog, Pair, Side
from dreamgym_lg.production.recorder import Recorder
from dreamgym_lg.production.simulation import RealRun, Simulation

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Simulated sides that one event loop plays at once; a thread plays one."""


class Shadows:
    """Plays the other sides of real runs, each after its real run has ended, and stores what they agree in.

    The side of a run in a thread is played in a thread of its own, that of an asynchronous run as a task of the same loop:
    the clients of models are bound to their loop. A loop that ends ends its tasks. Once `most_waiting` wait, further
    ones are dropped and counted.
    """

    def __init__(self, simulation: Simulation, log: CanaryLog, name: str, *, most_waiting: int) -> None:
        self._simulation, self._log, self._name, self._most = simulation, log, name, most_waiting
        self._changed = threading.Condition()
        self._waiting = self._dropped = 0
        self._queue: queue.SimpleQueue[RealRun] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: int | None = None
        """That of the thread."""
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
        self._tasks = set[asyncio.Task[None]]()

    def wait(self, timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    # --- before the real run ----------------------------------------------------------------------------------------------

    def snapshot(self, graph: Pregel, payload: Any, config: RunnableConfig, arguments: Mapping[str, Any]) -> RealRun:
        try:
            before = graph.get_state(config).values if _remembers(graph, config) else None
            return _snapshot(graph, payload, config, arguments, before)
        except Exception as error:
            return _unusable(config, error)

    async def asnapshot(self, graph: Pregel, payload: Any, config: RunnableConfig, arguments: Mapping[str, Any]) -> RealRun:
        try:
            before = (await graph.aget_state(config)).values if _remembers(graph, config) else None
            return _snapshot(graph, payload, config, arguments, before)
        except Exception as error:
            return _unusable(config, error)

    # --- after it ---------------------------------------------------------------------------------------------------------

    def submit(self, run: RealRun, chosen: Side, recorder: Recorder, success: bool | None) -> None:
        """Play the other side of a run that has ended, or store why not."""
        if not recorder.ended:
            return
        with self._changed:
            if self._waiting >= self._most:
                self._dropped += 1
                return
            self._waiting += 1
        run.chosen, run.success = chosen, success
        if recorder.interrupted:
            run.unusable = "interrupted"
        elif run.unusable is None:
            run.calls, run.state = recorder.calls, copy.copy(recorder.state)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._start().put(run)
        else:
            task = loop.create_task(self._aplay(run), context=Context())  # not a part of the run, nor of its traces
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _start(self) -> "queue.SimpleQueue[RealRun]":
        """The queue of the thread, which is started by the first run of a process: a fork has none."""
        with self._changed:
            if self._process not in (None, os.getpid()):
                self._queue, self._waiting = queue.SimpleQueue(), 1
            if self._thread is None or self._process != os.getpid():
                self._process = os.getpid()
                self._thread = threading.Thread(target=self._work, name="dreamgym-shadows", daemon=True)
                self._thread.start()
            return self._queue

    def _work(self) -> None:
        while True:
            self._play(self._queue.get())

    def _play(self, run: RealRun) -> None:
        try:
            self._store(_unplayed(run) or self._simulation.play(run))
        except BaseException as error:
            logger.warning("the simulated side of a run is lost: %s", type(error).__name__)
        finally:
            self._done()

    async def _aplay(self, run: RealRun) -> None:
        try:
            async with self._loops.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE)):
                pair = _unplayed(run) or await self._simulation.aplay(run)
            await asyncio.to_thread(self._store, pair)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            logger.warning("the simulated side of a run is lost: %s", type(error).__name__)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Also of a task that its loop's end has cancelled before it began."""
        self._tasks.discard(task)
        self._done()

    def _done(self) -> None:
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()

    def _store(self, pair: Pair) -> None:
        with self._changed:
            dropped, self._dropped = self._dropped, 0
        try:
            self._log.add_pair(self._name, pair, dropped=dropped)
        except Exception as error:
            logger.warning("%s", error)


def _unplayed(run: RealRun) -> Pair | None:
    return None if run.unusable is None else Pair(run.thread, run.chosen, run.unusable, real_success=run.success)


def _remembers(graph: Pregel, config: RunnableConfig) -> bool:
    """True if its thread may have a state from before."""
    configurable = config.get("configurable") or {}
    saves = isinstance(graph.checkpointer, BaseCheckpointSaver) or "__pregel_checkpointer" in configurable
    return saves and "thread_id" in configurable


def _snapshot(graph: Pregel, payload: Any, config: RunnableConfig, arguments: Mapping[str, Any], before: Any) -> RealRun:
    """The run as it begins, before it changes any of its input."""
    if payload is None or isinstance(payload, Command):
        return RealRun(thread=_thread(config), unusable="resumed")
    payload = copy.deepcopy(_behind(graph, before, payload) if before else payload)
    own = {key: value for key, value in (config.get("configurable") or {}).items() if not is_langgraphs(key)}
    context = {"context": arguments["context"]} if "context" in arguments else {}
    return RealRun(thread=_thread(config), payload=payload, config={"configurable": own}, arguments=context)


def is_langgraphs(key: str) -> bool:
    """True for LangGraph's own keys, which say whose checkpoints a run reads and writes."""
    return key.startswith("__") or key in ("thread_id", "checkpoint_id", "checkpoint_ns", "checkpoint_map")


def _behind(graph: Pregel, before: Mapping[str, Any], payload: Any) -> dict[str, Any]:
    """An input for a thread without a past that is this input behind that state: each key as its own reducer has it."""
    state = dict(before)
    for key, value in dict(payload).items():
        if key in before:
            kind: Any = graph.channels[key]
            channel = kind.from_checkpoint(before[key])
            channel.update([value])
            value = channel.get()
        state[key] = value
    return state


def _thread(config: RunnableConfig) -> str | None:
    thread = (config.get("configurable") or {}).get("thread_id")
    return None if thread is None else str(thread)


def _unusable(config: RunnableConfig, error: Exception) -> RealRun:
    logger.warning("a run has no simulated side, since its input cannot be copied: %s", type(error).__name__)
    return RealRun(thread=_thread(config), unusable="failed")
