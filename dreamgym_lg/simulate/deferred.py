"""Lets what runs later belong to the episode that registered it: callbacks, initialisers, log records, finalisers, exits."""

import atexit
import contextlib
import functools
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from logging.handlers import QueueHandler, QueueListener
from multiprocessing.util import Finalize
from typing import Any

from dreamgym_lg.simulate.context import ContextEpisode, RealAccessBlocked, guarded_episode, in_episode
from dreamgym_lg.simulate.dispatch import Args, Kwargs, Method, dispatch
from dreamgym_lg.simulate.user_code import started_by, user_line, users_frame


def patch_deferred() -> None:
    """Patch what registers code to be called later; once per process."""
    dispatch(ThreadPoolExecutor, "__init__", _create_pool)
    dispatch(Future, "add_done_callback", _add_done_callback)
    dispatch(QueueHandler, "enqueue", _enqueue)
    setattr(QueueListener, "handle", _handling(QueueListener.handle))  # noqa: B010
    setattr(atexit, "register", _registering(atexit.register))  # noqa: B010
    for owner in (weakref.finalize, Finalize):
        dispatch(owner, "__init__", _create_finalizer)
        dispatch(owner, "__call__", _finalize)
    gc.callbacks.append(_around_collection)


# --- callbacks --------------------------------------------------------------------------------------------------------------


def _context() -> Context:
    context = copy_context()
    context.run(started_by.set, user_line())
    return context


def _owned(function: Callable[..., Any]) -> Callable[..., Any]:
    context = _context()
    return functools.wraps(function)(lambda *args, **kwargs: context.copy().run(function, *args, **kwargs))


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the guard raises would end the thread that calls it, which may be production's; the guard has noted it."""

    def call(*args: Any) -> None:
        with contextlib.suppress(RealAccessBlocked):
            function(*args)

    return call


def _create_pool(episode: ContextEpisode, original: Method, pool: ThreadPoolExecutor, args: Args, kwargs: Kwargs) -> None:
    original(pool, *args, **kwargs)
    if pool._initializer is not None and episode.guard is not None:
        pool._initializer = _owned(pool._initializer)


def _add_done_callback(episode: ContextEpisode, original: Method, future: Future[Any], args: Args, kwargs: Kwargs) -> None:
    function = args[0] if args else kwargs["fn"]
    original(future, _quiet(_owned(function)) if episode.guard is not None else function)


_queued: weakref.WeakKeyDictionary[logging.LogRecord, Context] = weakref.WeakKeyDictionary()
"""Records on their way to a listener's thread, with the context of the code that logged them."""


def _enqueue(episode: ContextEpisode, original: Method, handler: QueueHandler, args: Args, kwargs: Kwargs) -> None:
    if episode.guard is not None:
        _queued[args[0]] = _context()
    original(handler, *args, **kwargs)


def _handling(original: Method) -> Method:
    @functools.wraps(original)
    def handle(listener: QueueListener, record: logging.LogRecord) -> None:
        context = _queued.pop(record, None)
        if context is None:
            original(listener, record)
        else:
            _quiet(context.run)(original, listener, record)

    return handle


def _registering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Packages register what cleans up after the process; only what the user's own code registers is the episode's."""

    @functools.wraps(original)
    def register(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        episode = guarded_episode()
        if episode is None or episode.guard is None or not users_frame(sys._getframe(1)):
            return original(function, *args, **kwargs)
        original(_owned(function), *args, **kwargs)
        return function

    return register


# --- finalisers ---------------------------------------------------------------------------------------------------------------
# What an episode registers belongs to it for ever; all other finalisers belong to production. A `__del__` that the garbage
# collector calls belongs to production, for nothing tells who created its object; one that runs since the last reference went
# belongs to the episode whose code let go of it.


def _create_finalizer(episode: ContextEpisode, original: Method, finalizer: Any, args: Args, kwargs: Kwargs) -> None:
    watched, function, *rest = args
    if episode.guard is not None and function is not None:
        function = functools.partial(_run_owned, episode, function)
    original(finalizer, watched, function, *rest, **kwargs)


def _run_owned(episode: ContextEpisode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _collecting_thread
    before, _collecting_thread = _collecting_thread, 0
    try:
        return run_in(episode, function, *args, **kwargs)
    finally:
        _collecting_thread = before


def _finalize(episode: ContextEpisode, original: Method, finalizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Python gives the dead reference; code that calls it itself gives none."""
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
