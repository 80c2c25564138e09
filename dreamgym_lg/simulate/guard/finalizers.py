"""Finalisers act for who created the object, not for the episode that happens to run when it is collected."""

import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.util import Finalize
from typing import Any

from dreamgym_lg.simulate.context import ActiveEpisode, active, in_episode
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
    original(finalizer, watched, functools.partial(_run_in, episode, function), *rest, **kwargs)


def _run_in(episode: ActiveEpisode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with in_episode(episode):
        return function(*args, **kwargs)


def _finalize(episode: ActiveEpisode, original: Method, finalizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Python gives the dead reference; code that calls it itself gives none."""
    with in_episode(None if args else episode):
        return original(finalizer, *args, **kwargs)


_collecting = ExitStack()
"""One is enough: a process has one collection at a time."""


def _around_collection(phase: str, info: Any) -> None:
    if phase == "stop":
        _collecting.close()
    elif active() is not None:
        _collecting.enter_context(in_episode(None))
