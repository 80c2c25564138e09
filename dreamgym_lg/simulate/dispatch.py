"""Patches methods of classes so that inside an episode they ask it."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.context import guarded_episode

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Method = Callable[..., Any]
Handler = Callable[[Any, Method, Any, Args, Kwargs], Any]
"""(episode, original method, self, args, kwargs) -> what the method returns inside the episode."""


def dispatch(owner: type, name: str, handler: Handler, lookup: Callable[[], Any] = guarded_episode) -> None:
    """Replace `owner.name` by a method that calls `handler` inside an episode.

    The episode is what `lookup` returns; None calls the original method. Idempotent. Outside episodes it costs one look at a
    ContextVar. Raises `ConfigurationError` if the installed version has no such method.
    """
    original = owner.__dict__.get(name)
    if original is None:
        raise ConfigurationError(
            f"{owner.__module__}.{owner.__name__} has no method {name!r} in the installed version, which simulation needs: "
            "install a version of langchain-core and langgraph that pyproject.toml names"
        )
    if hasattr(original, "__dreamgym__") or not callable(original):
        return
    if name.endswith("_v3"):  # LangChain's own note that these are beta is for other callers
        original = inspect.unwrap(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        episode = lookup()
        if episode is None:
            return original(self, *args, **kwargs)
        return handler(episode, original, self, args, kwargs)

    method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # LangChain asks for it at every call
    method.__dreamgym__ = owner, name  # type: ignore[attr-defined]
    setattr(owner, name, method)


def subclasses(owner: type) -> Iterator[type]:
    """`owner` and every class derived from it so far; one with several bases may come again."""
    derived: type
    yield owner
    for derived in type.__subclasses__(owner):
        yield from subclasses(derived)
