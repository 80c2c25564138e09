"""Patching methods of classes so that they ask the active episode; without one they do what they did."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.context import ActiveEpisode, active

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Method = Callable[..., Any]
Handler = Callable[[ActiveEpisode, Method, Any, Args, Kwargs], Any]
"""(episode, original method, self, args, kwargs) -> what the method returns inside the episode."""


def dispatch(
    owner: type,
    name: str,
    handler: Callable[[Any, Method, Any, Args, Kwargs], Any],
    asked: Callable[[], Any] = active,
) -> None:
    """Replace `owner.name` by a method that calls `handler` while an episode is active, and the original otherwise.

    Args: `asked` says what is active, and is the handler's first argument; None: nothing.

    Idempotent. Outside episodes it costs one look at a ContextVar. Raises `ConfigurationError` if the installed version has
    no such method.
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
        found = asked()
        if found is None:
            return original(self, *args, **kwargs)
        return handler(found, original, self, args, kwargs)

    method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # LangChain asks for it at every call
    method.__dreamgym__ = owner, name  # type: ignore[attr-defined]
    setattr(owner, name, method)


def subclasses(owner: type) -> Iterator[type]:
    """`owner` and every class derived from it so far, each once."""
    seen: set[type] = {owner}
    waiting = [owner]
    while waiting:
        cls = waiting.pop()
        yield cls
        derived: type
        for derived in type.__subclasses__(cls):
            if derived not in seen:
                seen.add(derived)
                waiting.append(derived)
