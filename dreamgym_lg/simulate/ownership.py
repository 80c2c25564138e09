"""Lets threads, tasks, queue items, callbacks and finalisers belong to their episode.

Threads and tasks belong to their episode until a queue brings them the work of another; LangGraph's own belong to their run
already, by the context that it copies. A pool's callbacks run as of who registered them.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import queue
import threading
import weakref
from asyncio import BaseEventLoop
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from multiprocessing.pool import Pool, ThreadPool
from multiprocessing.util import Finalize
from typing import Any

from langchain_core.runnables.config import var_child_runnable_config

from dreamgym_lg.simulate.context import (
    Args,
    ContextEpisode,
    EpisodeBroken,
    Kwargs,
    Method,
    RealAccessBlocked,
    Worker,
    context_owner,
    dispatch,
    in_episode,
    lend,
    set_var,
)
from dreamgym_lg.simulate.user_code import frames, started_by, user_line

logger = logging.getLogger(__name__)

Owner = ContextEpisode | Worker

_making_worker: ContextVar[bool] = ContextVar("dreamgym_making_worker", default=False)
"""A pool starts threads of its own: the work belongs to who gives it, and the thread, which may outlive it, to nobody."""


def patch_threads() -> None:
    """Patch what starts threads and tasks and gives them work; idempotent."""
    dispatch(threading.Thread, "start", _start, context_owner)
    dispatch(ThreadPoolExecutor, "submit", _submit, context_owner)
    dispatch(ThreadPool, "__init__", _make_pool, context_owner)
    for name in ("apply_async", "_map_async", "imap", "imap_unordered"):  # all else that a pool offers ends in one of these
        dispatch(Pool, name, _give_to_pool, context_owner)
    dispatch(BaseEventLoop, "create_task", _create_task, context_owner)
    dispatch(BaseEventLoop, "run_in_executor", _run_in_executor)
    for kind, put in ((queue.Queue, "put"), (asyncio.Queue, "put_nowait")):
        dispatch(kind, put, _put)
    dispatch(asyncio.Queue, "get_nowait", _get, lambda: True)
    for each in (queue.Queue, queue.LifoQueue, queue.PriorityQueue):  # what `get` calls, in which a thread may wait already
        dispatch(each, "_get", _get, lambda: True)


def _started(owner: Owner, name: str) -> Worker | None:
    """The worker of what this code starts. None: production's, which is left as it is."""
    if isinstance(owner, Worker):
        return owner.start(name, user_line())
    return Worker(name, user_line(), [owner]) if owner.owns_threads else None


def _start(owner: Owner, original: Method, thread: threading.Thread, args: Args, kwargs: Kwargs) -> Any:
    if not _making_worker.get() and (worker := _started(owner, f"thread {thread.name!r}")) is not None:
        thread.run = functools.partial(_run, worker, _copy_context(worker), thread.run)  # type: ignore[method-assign]
    return original(thread)


def _run(worker: Worker, context: Context, run: Callable[[], None]) -> None:
    """End a stopped thread with one line: the episode tells what was stopped, and where."""
    try:
        context.run(run)
    except (RealAccessBlocked, EpisodeBroken) as stopped:
        logger.warning("%s, started at %s, has ended: %s", worker.name, worker.started_at, stopped)


def _submit(owner: Owner, original: Method, pool: ThreadPoolExecutor, args: Args, kwargs: Kwargs) -> Any:
    if (worker := _started(owner, "work of a pool")) is None:
        return original(pool, *args, **kwargs)
    task, *rest = args
    context = _copy_context(worker)
    with set_var(_making_worker, True):
        return original(pool, context.run, task, *rest, **kwargs)


def _make_pool(owner: Owner, original: Method, pool: ThreadPool, args: Args, kwargs: Kwargs) -> Any:
    args, kwargs = _owned(owner, args, kwargs)
    with set_var(_making_worker, True):
        return original(pool, *args, **kwargs)


def _give_to_pool(owner: Owner, original: Method, pool: Pool, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(pool, ThreadPool):
        args, kwargs = _owned(owner, args, kwargs)
    return original(pool, *args, **kwargs)


def _owned(owner: Owner, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """A thread pool's arguments, its work, initialisers and callbacks as of who gives them."""
    if (worker := _started(owner, "work of a pool")) is None:
        return args, kwargs
    context = _copy_context(worker)

    def owned(value: Any) -> Any:
        return _raising_exceptions(_in_context(context, value)) if callable(value) else value

    return tuple(map(owned, args)), {name: owned(value) for name, value in kwargs.items()}


def _raising_exceptions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Raise what stops an episode as an `Exception`: else the pool's thread ends, and its caller waits for ever."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RealAccessBlocked, EpisodeBroken) as stopped:  # which the episode has noted
            raise RuntimeError(str(stopped)) from stopped

    return call


def _in_context(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args, **kwargs: context.copy().run(function, *args, **kwargs))


def _create_task(owner: Owner, original: Method, loop: BaseEventLoop, args: Args, kwargs: Kwargs) -> Any:
    """A task has the context already. This adds who made it: it may outlive the episode."""
    coroutine = args[0] if args else kwargs["coro"]
    name = f"task of {getattr(coroutine, '__qualname__', coroutine)}"
    of_run = _made_by_langgraph()
    if isinstance(owner, Worker):
        if getattr(coroutine, "cr_code", None) is asyncio.Queue.get.__code__:  # in `wait_for`: what it takes, its worker takes
            return original(loop, *args, **kwargs)
        worker = owner.start(owner.name, owner.started_at) if of_run else _started(owner, name)
    elif of_run or not owner.owns_threads:
        with set_var(started_by, user_line()):
            return original(loop, *args, **kwargs)
    else:
        worker = _started(owner, name)
    with in_episode(worker), set_var(started_by, worker.started_at if worker is not None else ""):
        return original(loop, *args, **kwargs)


def _made_by_langgraph() -> bool:
    """Tells if the new task is one of a graph's run, which ends with it."""
    modules = (frame.f_globals.get("__name__", "") for frame in frames())
    maker = next((each for each in modules if not each.startswith(("asyncio", "dreamgym_lg.simulate"))), "")
    return maker.startswith(("langgraph.", "langchain_core."))


THREADS = ThreadPoolExecutor(1024, thread_name_prefix="dreamgym")
"""Threads come on demand. A loop's own executor has a few, for which hundreds of episodes would wait."""


def _run_in_executor(episode: ContextEpisode, original: Method, loop: BaseEventLoop, args: Args, kwargs: Kwargs) -> Any:
    pool, *rest = args
    return original(loop, THREADS if pool is None and episode.guard is not None else pool, *rest)


def _copy_context(worker: Worker) -> Context:
    """This context for new work, with the line that starts it."""
    with in_episode(worker), set_var(started_by, worker.started_at):
        return copy_context()


# --- queues: who put an item gave the work ------------------------------------------------------------------------------------

_OWNERS = "_dreamgym_owners"
"""Attribute of a queue: id of an item -> who put it there, oldest first."""
_lock = threading.Lock()


def _put(episode: ContextEpisode, original: Method, jobs: Any, args: Args, kwargs: Kwargs) -> Any:
    if not episode.owns_threads:
        return original(jobs, *args, **kwargs)
    item = args[0] if args else kwargs["item"]
    with _lock:  # before it is there, for whoever waits takes it at once; kept with it, as ids are used again
        owners = vars(jobs).setdefault(_OWNERS, {}).setdefault(id(item), deque())
        owners.append((item, episode, var_child_runnable_config.get() is not None))
    try:
        return original(jobs, *args, **kwargs)
    except BaseException:  # full
        _pop_owner(jobs, item)
        raise


def _get(_: bool, original: Method, jobs: Any, args: Args, kwargs: Kwargs) -> Any:
    item = original(jobs, *args, **kwargs)
    episode, by_node = _pop_owner(jobs, item)
    if isinstance(worker := context_owner(), Worker):
        worker.take(jobs, episode)
    elif worker is None and episode is not None and by_node:  # else it may be a driver's, which reads what its episodes made
        lend(jobs, episode)
    return item


def _pop_owner(jobs: Any, item: Any) -> tuple[ContextEpisode | None, bool]:
    """The episode that put the item there (None: production), and whether a node did."""
    if not (items := vars(jobs).get(_OWNERS)):
        return None, False
    with _lock:
        owners = items.get(id(item))
        _, episode, by_node = owners.popleft() if owners else (item, None, False)
        if not owners:
            items.pop(id(item), None)
    return episode, by_node


# --- what is called later -----------------------------------------------------------------------------------------------------


def patch_deferred() -> None:
    """Patch what registers code to be called later; once per process."""
    dispatch(ThreadPoolExecutor, "__init__", _create_pool)
    dispatch(Future, "add_done_callback", _add_done_callback)
    for owner in (weakref.finalize, Finalize):
        dispatch(owner, "__call__", _finalize)
    gc.callbacks.append(_around_collection)


def _context() -> Context:
    context = copy_context()
    context.run(started_by.set, user_line())
    return context


def _create_pool(episode: ContextEpisode, original: Method, pool: ThreadPoolExecutor, args: Args, kwargs: Kwargs) -> None:
    original(pool, *args, **kwargs)
    if pool._initializer is not None and episode.guard is not None:
        pool._initializer = _in_context(_context(), pool._initializer)


def _add_done_callback(episode: ContextEpisode, original: Method, future: Future[Any], args: Args, kwargs: Kwargs) -> None:
    function = args[0] if args else kwargs["fn"]
    if episode.guard is None:
        return original(future, function)
    function = _in_context(_context(), function)

    def call(done: Future[Any]) -> None:
        with contextlib.suppress(RealAccessBlocked):  # the guard has noted it; the thread may be production's
            function(done)

    return original(future, call)


def _finalize(episode: ContextEpisode, original: Method, finalizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Finalisers belong to production. Python gives the dead reference; code that calls one itself gives none."""
    return run_in(None if args else episode, original, finalizer, *args, **kwargs)


def run_in(episode: ContextEpisode | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` inside `episode`, in a context of its own.

    A collection may begin while CPython sets a variable of the current context; to set another one then crashes 3.11.
    """

    def run() -> Any:
        with in_episode(episode):
            return function(*args, **kwargs)

    return copy_context().run(run)


_collecting_thread = 0
"""The thread in which garbage is being collected; a process has one collection at a time."""


def is_collecting() -> bool:
    """Tells if this thread collects garbage, so that what runs is a finaliser."""
    return _collecting_thread == threading.get_ident()


def _around_collection(phase: str, info: Any) -> None:
    global _collecting_thread
    _collecting_thread = threading.get_ident() if phase == "start" else 0
