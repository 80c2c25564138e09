"""What an episode hands to others to be called later belongs to it: callbacks, initialisers, log records, exit functions."""

import atexit
import functools
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from logging.handlers import QueueHandler, QueueListener
from typing import Any
from weakref import WeakKeyDictionary

from dreamgym_lg.simulate.context import ActiveEpisode, active
from dreamgym_lg.simulate.dispatch import Args, Kwargs, Method, dispatch
from dreamgym_lg.simulate.guard.frames import is_users, started_by, user_line


def patch_callbacks() -> None:
    """Once per process."""
    dispatch(ThreadPoolExecutor, "__init__", _make_pool)
    dispatch(Future, "add_done_callback", _add_done_callback)
    dispatch(QueueHandler, "enqueue", _enqueue)
    setattr(QueueListener, "handle", _handling(QueueListener.handle))  # noqa: B010
    setattr(atexit, "register", _registering(atexit.register))  # noqa: B010


def _context() -> Context:
    context = copy_context()
    context.run(started_by.set, user_line())
    return context


def _owned(function: Callable[..., Any]) -> Callable[..., Any]:
    context = _context()
    return functools.wraps(function)(lambda *args, **kwargs: context.copy().run(function, *args, **kwargs))


def _make_pool(episode: ActiveEpisode, original: Method, pool: ThreadPoolExecutor, args: Args, kwargs: Kwargs) -> None:
    original(pool, *args, **kwargs)
    if pool._initializer is not None and episode.guard is not None:
        pool._initializer = _owned(pool._initializer)


def _add_done_callback(episode: ActiveEpisode, original: Method, future: Future[Any], args: Args, kwargs: Kwargs) -> None:
    function = args[0] if args else kwargs["fn"]
    original(future, _quiet(_owned(function)) if episode.guard is not None else function)


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the guard raises would end the thread that calls it, which may be production's; the guard has noted it."""

    def call(*args: Any) -> None:
        try:
            function(*args)
        except Exception:
            raise
        except BaseException as error:
            if not hasattr(error, "blocked"):
                raise

    return call


_queued: WeakKeyDictionary[logging.LogRecord, Context] = WeakKeyDictionary()
"""Records on their way to a listener's thread, with the context of the code that logged them."""


def _enqueue(episode: ActiveEpisode, original: Method, handler: QueueHandler, args: Args, kwargs: Kwargs) -> None:
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
        episode = active()
        if episode is None or episode.guard is None or not is_users(sys._getframe(1)):
            return original(function, *args, **kwargs)
        original(_owned(function), *args, **kwargs)
        return function

    return register
