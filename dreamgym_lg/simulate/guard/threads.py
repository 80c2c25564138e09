"""Threads and tasks: those that a graph starts belong to its episode, until a queue brings them the work of another.

LangGraph's own belong to their run already, by the context that it copies.
"""

import asyncio
import functools
import logging
import queue
import sys
import threading
from asyncio import BaseEventLoop
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

from langchain_core.runnables.config import var_child_runnable_config

from dreamgym_lg.simulate.context import ActiveEpisode, EpisodeBroken, Worker, holder, in_episode, lend, set_var
from dreamgym_lg.simulate.dispatch import Args, Kwargs, Method, dispatch
from dreamgym_lg.simulate.guard.frames import started_by, user_line
from dreamgym_lg.simulate.guard.guard import RealAccessBlocked

logger = logging.getLogger(__name__)

Holder = ActiveEpisode | Worker

_making_worker: ContextVar[bool] = ContextVar("dreamgym_making_worker", default=False)
"""A pool starts threads of its own: the work belongs to who gives it, and the thread, which may outlive it, to nobody."""


def patch_threads() -> None:
    dispatch(threading.Thread, "start", _start, holder)
    dispatch(ThreadPoolExecutor, "submit", _submit, holder)
    dispatch(ThreadPool, "__init__", _make_pool, holder)
    for name in ("apply_async", "_map_async", "imap", "imap_unordered"):  # all else that a pool offers ends in one of these
        dispatch(Pool, name, _give_to_pool, holder)
    dispatch(BaseEventLoop, "create_task", _create_task, holder)
    dispatch(BaseEventLoop, "run_in_executor", _run_in_executor)
    for kind, put in ((queue.Queue, "put"), (asyncio.Queue, "put_nowait")):
        dispatch(kind, put, _put)
    dispatch(asyncio.Queue, "get_nowait", _get, lambda: True)
    for each in (queue.Queue, queue.LifoQueue, queue.PriorityQueue):  # what `get` calls, in which a thread may wait already
        dispatch(each, "_get", _get, lambda: True)


def _started(found: Holder, name: str) -> Worker | None:
    """What a new thread, task or work of this code belongs to; None: production, which is left as it is."""
    if isinstance(found, Worker):
        return found.start(name, user_line())
    return Worker(name, user_line(), [found]) if found.owns_threads else None


def _start(found: Holder, original: Method, thread: threading.Thread, args: Args, kwargs: Kwargs) -> Any:
    if not _making_worker.get() and (worker := _started(found, f"thread {thread.name!r}")) is not None:
        thread.run = functools.partial(_run, worker, _copy_context(worker), thread.run)  # type: ignore[method-assign]
    return original(thread)


def _run(worker: Worker, context: Context, run: Callable[[], None]) -> None:
    """A thread that was stopped ends with one line: the episode itself tells what was stopped, and where."""
    try:
        context.run(run)
    except (RealAccessBlocked, EpisodeBroken) as stopped:
        logger.warning("%s, started at %s, has ended: %s", worker.name, worker.started_at, stopped)


def _submit(found: Holder, original: Method, pool: ThreadPoolExecutor, args: Args, kwargs: Kwargs) -> Any:
    if (worker := _started(found, "work of a pool")) is None:
        return original(pool, *args, **kwargs)
    task, *rest = args
    context = _copy_context(worker)
    with set_var(_making_worker, True):
        return original(pool, context.run, task, *rest, **kwargs)


def _make_pool(found: Holder, original: Method, pool: ThreadPool, args: Args, kwargs: Kwargs) -> Any:
    args, kwargs = _owned(found, args, kwargs)
    with set_var(_making_worker, True):
        return original(pool, *args, **kwargs)


def _give_to_pool(found: Holder, original: Method, pool: Pool, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(pool, ThreadPool):
        args, kwargs = _owned(found, args, kwargs)
    return original(pool, *args, **kwargs)


def _owned(found: Holder, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """What a thread pool is to call, be it work, initialiser or callback, as what belongs to who gives it."""
    if (worker := _started(found, "work of a pool")) is None:
        return args, kwargs
    context = _copy_context(worker)

    def owned(given: Any) -> Any:
        if not callable(given):
            return given
        return lambda *args, **kwargs: context.copy().run(given, *args, **kwargs)

    return tuple(map(owned, args)), {name: owned(given) for name, given in kwargs.items()}


def _create_task(found: Holder, original: Method, loop: BaseEventLoop, args: Args, kwargs: Kwargs) -> Any:
    """A task has the context already; this adds who made it, and that it may outlive the episode."""
    made = args[0] if args else kwargs["coro"]
    of_run = _made_by_langgraph()
    if isinstance(found, Worker):
        if getattr(made, "cr_code", None) is asyncio.Queue.get.__code__:  # in `wait_for`: what it takes, its worker takes
            return original(loop, *args, **kwargs)
        worker = found.start(found.name, found.started_at) if of_run else _started(found, _name(made))
    elif of_run or not found.owns_threads:
        with set_var(started_by, user_line()):
            return original(loop, *args, **kwargs)
    else:
        worker = _started(found, _name(made))
    with in_episode(worker), set_var(started_by, worker.started_at if worker is not None else ""):
        return original(loop, *args, **kwargs)


def _name(made: Any) -> str:
    return f"task of {getattr(made, '__qualname__', made)}"


def _made_by_langgraph() -> bool:
    """Whether the task about to be made is one of a run's own, which ends with it."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("asyncio", "dreamgym_lg.simulate")):
            return module.startswith(("langgraph.", "langchain_core."))
        frame = frame.f_back  # type: ignore[assignment]
    return False


_POOL = ThreadPoolExecutor(1024, thread_name_prefix="dreamgym")
"""Threads come on demand. A loop's own executor has a few, for which hundreds of episodes would wait."""


def _run_in_executor(episode: ActiveEpisode, original: Method, loop: BaseEventLoop, args: Args, kwargs: Kwargs) -> Any:
    pool, *rest = args
    return original(loop, _POOL if pool is None and episode.guard is not None else pool, *rest)


def _copy_context(worker: Worker) -> Context:
    """This context as that of new work, with the line that started it: a thread's own frames do not reach back to it."""
    with in_episode(worker), set_var(started_by, worker.started_at):
        return copy_context()


# --- queues: who put an item gave the work ------------------------------------------------------------------------------------

_GIVEN = "_dreamgym_given"
_giving = threading.Lock()


def _put(episode: ActiveEpisode, original: Method, jobs: Any, args: Args, kwargs: Kwargs) -> Any:
    if not episode.owns_threads:
        return original(jobs, *args, **kwargs)
    item = args[0] if args else kwargs["item"]
    with _giving:  # before it is there, for whoever waits takes it at once; kept with it, as ids are used again
        given = vars(jobs).setdefault(_GIVEN, {}).setdefault(id(item), deque())
        given.append((item, episode, var_child_runnable_config.get() is not None))
    try:
        return original(jobs, *args, **kwargs)
    except BaseException:  # full
        _given_by(jobs, item)
        raise


def _get(found: bool, original: Method, jobs: Any, args: Args, kwargs: Kwargs) -> Any:
    item = original(jobs, *args, **kwargs)
    owner, by_node = _given_by(jobs, item)
    if isinstance(worker := holder(), Worker):
        worker.take(jobs, owner)
    elif worker is None and owner is not None and by_node:  # else it may be a driver's, which reads what its episodes made
        lend(jobs, owner)
    return item


def _given_by(jobs: Any, item: Any) -> tuple[ActiveEpisode | None, bool]:
    """The episode that put the item there, which is told once, and whether a node of its graph did; None: production."""
    if not (items := vars(jobs).get(_GIVEN)):
        return None, False
    with _giving:
        given = items.get(id(item))
        _, owner, by_node = given.popleft() if given else (item, None, False)
        if not given:
            items.pop(id(item), None)
    return owner, by_node
