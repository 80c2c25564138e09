"""Threads: raw threads and pools that a graph starts belong to its episode, as LangGraph's own do already."""

import functools
import threading
from asyncio import BaseEventLoop
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from dreamgym_lg.simulate.context import Method, dispatch, held
from dreamgym_lg.simulate.guard.guard import started_by, user_line

if TYPE_CHECKING:
    from dreamgym_lg.simulate.episode import Episode

_making_worker: ContextVar[bool] = ContextVar("dreamgym_making_worker", default=False)


def install() -> None:
    dispatch(threading.Thread, "start", _start)
    dispatch(ThreadPoolExecutor, "submit", _submit)
    dispatch(BaseEventLoop, "create_task", _create_task)
    dispatch(BaseEventLoop, "run_in_executor", _run_in_executor)


def _start(episode: "Episode", original: Method, thread: threading.Thread, args: Any, kwargs: Any) -> Any:
    if not _making_worker.get():
        thread.run = functools.partial(_carried().run, thread.run)  # type: ignore[method-assign]
    return original(thread)


def _submit(episode: "Episode", original: Method, pool: ThreadPoolExecutor, args: Any, kwargs: Any) -> Any:
    """The work belongs to the episode; the pool's worker, which may outlive it, does not."""
    task, *rest = args
    context = _carried()
    with held(_making_worker, True):
        return original(pool, context.run, task, *rest, **kwargs)


def _create_task(episode: "Episode", original: Method, loop: BaseEventLoop, args: Any, kwargs: Any) -> Any:
    """A task has the context already; it is told who made it."""
    with held(started_by, user_line()):
        return original(loop, *args, **kwargs)


_POOL = ThreadPoolExecutor(1024, thread_name_prefix="dreamgym")
"""Threads come on demand. A loop's own executor has a few, for which hundreds of episodes would wait."""


def _run_in_executor(episode: "Episode", original: Method, loop: BaseEventLoop, args: Any, kwargs: Any) -> Any:
    pool, *rest = args
    return original(loop, _POOL if pool is None and episode.guarded else pool, *rest)


def _carried() -> Context:
    """This context, and who carried it: a thread's own frames do not reach back to the user's line."""
    context = copy_context()
    context.run(started_by.set, user_line())
    return context
