"""Threads: raw threads and pools that a graph starts belong to its episode, as LangGraph's own do already."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any

from dreamgym_lg.simulate.context import Method, dispatch

if TYPE_CHECKING:
    from dreamgym_lg.simulate.episode import Episode

_making_worker: ContextVar[bool] = ContextVar("dreamgym_making_worker", default=False)


def install() -> None:
    dispatch(threading.Thread, "start", _start)
    dispatch(ThreadPoolExecutor, "submit", _submit)


def _start(episode: "Episode", original: Method, thread: threading.Thread, args: Any, kwargs: Any) -> Any:
    if not _making_worker.get():
        thread.run = functools.partial(copy_context().run, thread.run)  # type: ignore[method-assign]
    return original(thread)


def _submit(episode: "Episode", original: Method, pool: ThreadPoolExecutor, args: Any, kwargs: Any) -> Any:
    """The work belongs to the episode; the pool's worker, which may outlive it, does not."""
    task, *rest = args
    context = copy_context()
    token = _making_worker.set(True)
    try:
        return original(pool, context.run, task, *rest, **kwargs)
    finally:
        _making_worker.reset(token)
