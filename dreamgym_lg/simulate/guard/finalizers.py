"""Finalisers act for who created the object, not for the episode that happens to run when it is collected."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from contextvars import copy_context
from multiprocessing.util import Finalize
from typing import Any

from dreamgym_lg.simulate.context import ActiveEpisode, in_episode
from dreamgym_lg.simulate.dispatch import Args, Kwargs, Method, dispatch


def patch_finalizers() -> None:
    """Idempotent. What an episode registers belongs to it for ever; all other finalisers belong to production.

    A `__del__` that the garbage collector calls belongs to production, for nothing tells who created its object; one that
    runs since the last reference went belongs to the episode whose code let go of it.
    """
    for owner in (weakref.finalize, Finalize):
        dispatch(owner, "__init__", _register)
        dispatch(owner, "__call__", _finalize)
    if _around_collection not in gc.callbacks:
        gc.callbacks.append(_around_collection)


def _register(episode: ActiveEpisode, original: Method, finalizer: Any, args: Args, kwargs: Kwargs) -> None:
    watched, function, *rest = args
    if episode.guard is not None and function is not None:
        function = functools.partial(_run_owned, episode, function)
    original(finalizer, watched, function, *rest, **kwargs)


def _run_owned(episode: ActiveEpisode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _collector
    collector, _collector = _collector, 0
    try:
        return run_in(episode, function, *args, **kwargs)
    finally:
        _collector = collector


def _finalize(episode: ActiveEpisode, original: Method, finalizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Python gives the dead reference; code that calls it itself gives none."""
    return run_in(None if args else episode, original, finalizer, *args, **kwargs)


def run_in(episode: ActiveEpisode | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` inside `episode`, in a context of its own.

    A collection may begin while CPython sets a variable of the current context; to set another one then crashes 3.11.
    """

    def run() -> Any:
        with in_episode(episode):
            return function(*args, **kwargs)

    return copy_context().run(run)


_collector = 0
"""The thread in which garbage is being collected; a process has one collection at a time."""


def is_collecting() -> bool:
    """Whether this thread collects garbage, so that what runs is a finaliser."""
    return _collector == threading.get_ident()


def _around_collection(phase: str, info: Any) -> None:
    global _collector
    _collector = threading.get_ident() if phase == "start" else 0
