"""Which episode the running code belongs to, and how classes are taught to ask.

Everything here hangs on one ContextVar: LangGraph copies the context into every task and thread, so that concurrent episodes
stay apart and production calls in between see none at all.
"""

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from dreamgym_lg.errors import ConfigurationError

if TYPE_CHECKING:
    from dreamgym_lg.simulate.episode import Episode

_active: ContextVar["Episode | None"] = ContextVar("dreamgym_episode", default=None)

Method = Callable[..., Any]
T = TypeVar("T")


def active() -> "Episode | None":
    """The episode this code runs in; None in production, and inside the policy and the world themselves."""
    return _active.get()


@contextmanager
def held(variable: ContextVar[T], value: T) -> Iterator[None]:
    """The variable has this value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def entered(episode: "Episode | None") -> AbstractContextManager[None]:
    """The block belongs to `episode`; None: to nobody, as the policy and whoever plays the world do."""
    return held(_active, episode)


def pulled(source: Iterator[Any], episode: "Episode | None" = None) -> Iterator[Any]:
    """The items of `source`, each made inside of `episode`: a generator itself shares its caller's context."""
    end = object()
    try:
        while True:
            with entered(episode):
                item = next(source, end)
            if item is end:
                return
            yield item
    finally:
        if isinstance(source, Generator):
            with entered(episode):
                source.close()


async def apulled(source: AsyncIterator[Any], episode: "Episode | None" = None) -> AsyncIterator[Any]:
    """As `pulled`."""
    try:
        while True:
            with entered(episode):
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            yield item
    finally:
        if isinstance(source, AsyncGenerator):
            with entered(episode):
                await source.aclose()


def dispatch(
    owner: type, name: str, simulated: Callable[["Episode", Method, Any, tuple[Any, ...], dict[str, Any]], Any]
) -> None:
    """Let `owner.name` ask, whenever an episode is active, `simulated(episode, original, self, args, kwargs)` instead.

    Idempotent. Outside of episodes it costs one look at a ContextVar. Raises `ConfigurationError` if the installed version has
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
        episode = _active.get()
        if episode is None:
            return original(self, *args, **kwargs)
        return simulated(episode, original, self, args, kwargs)

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
