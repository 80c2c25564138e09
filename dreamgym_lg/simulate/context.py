"""Knows the episode that the running code belongs to, and patches methods to ask it.

One ContextVar holds it: LangGraph copies the context into every task and thread, so that concurrent episodes stay apart and
production calls in between see none at all. Threads and tasks that the graph starts by itself may outlive their episode and
be given work by others: there the variable holds a `Worker`, which knows whose work is at hand.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from dreamgym_lg.errors import ConfigurationError, OwnerUnknown

T = TypeVar("T")


class EpisodeBroken(BaseException):
    """Ends a graph whose world has failed or ended. `cause` or `last` of the episode says why."""


class Blocked(NamedTuple):
    """One real access that was stopped."""

    event: str
    """Python's name of it, e.g. `socket.connect`."""
    target: str
    where: str
    """The user's own line that led to it."""

    def __str__(self) -> str:
        return f"{self.event} of {self.target} at {self.where}"


class RealAccessBlocked(BaseException):
    """Raised at a real access inside a dream; a `BaseException`, because users write `except Exception`."""

    def __init__(self, *blocked: Blocked) -> None:
        first = "; ".join(map(str, blocked[:3]))
        super().__init__(f"a dreamed episode must not touch the real world: {first}; allow it with allow=, or simulate it")
        self.blocked = blocked


class ContextEpisode:
    """An episode as the context, its threads and its guard know it."""

    guard: Any = None
    """Its `Guard`; None where the real world may be touched."""
    owns_threads = False
    """Threads and pool work that its code starts belong to it; in production they are left as they are."""
    ended = False
    """Its block was left: whatever of its code still runs is answered by nobody."""


class Worker:
    """A thread or task that an episode's code started, with its work's owners.

    Work is known by the queue that brings it (`take`). Without that it does its first episode's, and after that nobody's.

    A thread or task that production has started is `lent`: an episode answers for the models and tools of the work that its
    node gave by a queue; no guard stands there, and once the episode has ended it is production's again.
    """

    def __init__(self, name: str, started_at: str, owners: Sequence[ContextEpisode | None], *, lent: bool = False) -> None:
        self.name, self.started_at, self.lent = name, started_at, lent
        self._owners = list(owners)
        """Who gave the work at hand; more than one while a batch is collected."""
        self._queues: dict[int, object] = {}
        """Those that have brought an episode's work; kept, since the id of a collected object is used again."""
        self._collecting = False
        """It has taken work and has not acted on it yet."""

    @property
    def owner(self) -> ContextEpisode | None:
        """The episode whose guard stands; None where all the work at hand is production's."""
        return None if self.lent else next((owner for owner in self._owners if owner is not None), None)

    @property
    def is_returned(self) -> bool:
        """It was lent, and whoever gave it the work at hand has ended."""
        return self.lent and all(owner is None or owner.ended for owner in self._owners)

    def take(self, queue: object, owner: ContextEpisode | None) -> None:
        """A queue gave it what `owner` had put there; None: production had.

        A queue that has brought no episode's work yet gives it none of production's either: it brings answers.
        """
        if owner is not None:
            self._queues[id(queue)] = queue
        elif id(queue) not in self._queues:
            return
        others = [other for other in self._owners if other is not owner] if self._collecting else []
        self._owners, self._collecting = [*others, owner], True

    def start(self, name: str, started_at: str) -> "Worker | None":
        """A thread or task that it starts for the work at hand. None: production's."""
        self._collecting = False
        return None if self._owners == [None] else Worker(name, started_at, self._owners)

    def answering_episode(self) -> ContextEpisode | None:
        """Who answers a call for the work at hand. Raises `OwnerUnknown` if it is the work of more than one."""
        self._collecting = False
        if len(self._owners) > 1:
            raise OwnerUnknown(
                f"{self.name}, started at {self.started_at}, asks a model or tool for work of more than one run at once "
                "(episodes, or an episode and production), of which each has its own policy: create it anew in every run, or "
                "let it ask for one at a time"
            )
        return self._owners[0]


_current: ContextVar[ContextEpisode | Worker | None] = ContextVar("dreamgym_episode", default=None)


def context_owner() -> ContextEpisode | Worker | None:
    """The episode that this code runs in, or the `Worker` that works for one."""
    owner = _current.get()
    return None if isinstance(owner, Worker) and owner.is_returned else owner


def guarded_episode() -> ContextEpisode | None:
    """The episode that this code runs in. None: production, the policy, or the environment."""
    owner = _current.get()
    return owner.owner if isinstance(owner, Worker) else owner


def answering_episode() -> ContextEpisode | None:
    """As `guarded_episode`, where a model, a tool or a graph is called.

    Raises `OwnerUnknown` where the episode has ended: the old policy would answer, perhaps to production.
    """
    owner = context_owner()
    episode = owner.answering_episode() if isinstance(owner, Worker) else owner
    if episode is not None and episode.ended:
        who = f"{owner.name}, started at {owner.started_at}," if isinstance(owner, Worker) else _thread_or_task()
        raise OwnerUnknown(
            f"{who} asks a model or tool after the episode that it belongs to has ended, and who gave it the work is "
            "unknown: create it anew in every run, or give it work by a queue.Queue, an asyncio.Queue, or a pool's submit"
        )
    return episode


def lend(queue: object, episode: ContextEpisode) -> None:
    """Lend this thread or task of production's to `episode`, whose node's work a queue brought."""
    worker = Worker(_thread_or_task(), "in production", [episode], lent=True)
    worker.take(queue, episode)
    _current.set(worker)


def _thread_or_task() -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return f"task {task.get_name()!r}" if task is not None else f"thread {threading.current_thread().name!r}"


@contextmanager
def set_var(variable: ContextVar[T], value: T) -> Iterator[None]:
    """The variable has this value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def in_episode(owner: ContextEpisode | Worker | None) -> AbstractContextManager[None]:
    """The block belongs to `owner`. None: to no episode, as the policy and the environment."""
    return set_var(_current, owner)


def iterate_in_episode(source: Iterator[Any], episode: ContextEpisode | None = None) -> Iterator[Any]:
    """The items of `source`, each made inside `episode`; a generator shares its caller's context."""
    end = object()
    try:
        while True:
            with in_episode(episode):
                item = next(source, end)
            if item is end:
                return
            yield item
    finally:
        if isinstance(source, Generator):
            with in_episode(episode):
                source.close()


async def aiterate_in_episode(source: AsyncIterator[Any], episode: ContextEpisode | None = None) -> AsyncIterator[Any]:
    """As `iterate_in_episode`."""
    try:
        while True:
            with in_episode(episode):
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
            yield item
    finally:
        if isinstance(source, AsyncGenerator):
            with in_episode(episode):
                await source.aclose()


# --- patching -----------------------------------------------------------------------------------------------------------------

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
