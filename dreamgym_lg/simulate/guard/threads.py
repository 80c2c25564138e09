"""Threads: raw threads and pools that a graph starts belong to its episode, as LangGraph's own do already."""

import functools
import threading
from asyncio import BaseEventLoop
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from typing import Any

from dreamgym_lg.simulate.context import ActiveEpisode, set_var
from dreamgym_lg.simulate.dispatch import Args, Kwargs, Method, dispatch
from dreamgym_lg.simulate.guard.frames import started_by, user_line

_making_worker: ContextVar[bool] = ContextVar("dreamgym_making_worker", default=False)


def patch_threads() -> None:
    dispatch(threading.Thread, "start", _start)
    dispatch(ThreadPoolExecutor, "submit", _submit)
    dispatch(BaseEventLoop, "create_task", _create_task)
    dispatch(BaseEventLoop, "run_in_executor", _run_in_executor)


def _start(episode: ActiveEpisode, original: Method, thread: threading.Thread, args: Args, kwargs: Kwargs) -> Any:
    if episode.owns_threads and not _making_worker.get():
        thread.run = functools.partial(_copy_context().run, thread.run)  # type: ignore[method-assign]
    return original(thread)


def _submit(episode: ActiveEpisode, original: Method, pool: ThreadPoolExecutor, args: Args, kwargs: Kwargs) -> Any:
    """The work belongs to the episode; the pool's worker, which may outlive it, does not."""
    if not episode.owns_threads:
        return original(pool, *args, **kwargs)
    task, *rest = args
    context = _copy_context()
    with set_var(_making_worker, True):
        return original(pool, context.run, task, *rest, **kwargs)


def _create_task(episode: ActiveEpisode, original: Method, loop: BaseEventLoop, args: Args, kwargs: Kwargs) -> Any:
    """A task has the context already; this adds who made it."""
    with set_var(started_by, user_line()):
        return original(loop, *args, **kwargs)


_POOL = ThreadPoolExecutor(1024, thread_name_prefix="dreamgym")
"""Threads come on demand. A loop's own executor has a few, for which hundreds of episodes would wait."""


def _run_in_executor(episode: ActiveEpisode, original: Method, loop: BaseEventLoop, args: Args, kwargs: Kwargs) -> Any:
    pool, *rest = args
    return original(loop, _POOL if pool is None and episode.guard is not None else pool, *rest)


def _copy_context() -> Context:
    """This context, with the user's line that copied it: a thread's own frames do not reach back to it."""
    context = copy_context()
    context.run(started_by.set, user_line())
    return context
