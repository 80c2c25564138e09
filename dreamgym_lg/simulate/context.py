"""The episode that the running code belongs to, and patches that look it up.

A ContextVar holds it. LangGraph and asyncio copy the context into every task, and threads of an episode's code get a copy.
"""

import asyncio
import functools
import gc
import inspect
import logging
import queue
import threading
import weakref
from asyncio import BaseEventLoop
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from multiprocessing.pool import Pool, ThreadPool
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from dreamgym_lg.errors import ConfigurationError, OwnerUnknown
from dreamgym_lg.user_code import frames, started_by, user_line, users_frame

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EpisodeBroken(BaseException):
    """Ends a graph whose environment failed or ended: see the episode's `cause` and `last`."""


class Blocked(NamedTuple):
    """A real access that the guard stopped."""

    event: str
    """Name of the audit event, e.g. `socket.connect`."""
    target: str
    where: str
    """The user's line that caused it."""

    def __str__(self) -> str:
        return f"{self.event} of {self.target} at {self.where}"


class RealAccessBlocked(BaseException):
    """Raised at a real access in a dream; a `BaseException`, because users write `except Exception`."""

    def __init__(self, *blocked: Blocked) -> None:
        first = "; ".join(map(str, blocked[:3]))
        super().__init__(f"a dreamed episode must not touch the real world: {first}; allow it with allow=, or simulate it")
        self.blocked = blocked


class ContextEpisode:
    """The attributes of an episode that contexts, threads and guards use."""

    guard: Any = None
    """Its `Guard`; None if real access is allowed."""
    owns_threads = False
    """True if threads and pool work that its code starts belong to it; False in production."""
    ended = False
    """True after its block: calls of code that still runs are refused."""


class PolicyCall(NamedTuple):
    """Marks code that generates a policy's reply. It is outside of the episode; the agent's callbacks run inside."""

    episode: ContextEpisode
    handlers: Collection[Any]
    """The policy's own callbacks, which run outside of the episode."""


Owner = ContextEpisode | PolicyCall | None

_current: ContextVar[Owner] = ContextVar("dreamgym_episode", default=None)
in_flight = set[ContextEpisode]()
"""The running episodes of this process."""


def guarded_episode() -> ContextEpisode | None:
    """The episode of the running code; None in production, the policy and the environment."""
    current = _current.get()
    return current if isinstance(current, ContextEpisode) else None


def policy_call() -> PolicyCall | None:
    """The policy's reply that the running code generates; None otherwise."""
    current = _current.get()
    return current if isinstance(current, PolicyCall) else None


def answering_episode() -> ContextEpisode | None:
    """As `guarded_episode`, for a call of a model, tool or graph. Raises `OwnerUnknown` if the episode has ended."""
    episode = guarded_episode()
    if episode is not None and episode.ended:
        raise OwnerUnknown(
            f"{_thread_or_task()} asks a model or tool after the episode that it belongs to has ended: create it anew in every "
            "run, or give its work to a pool's submit"
        )
    return episode


def _thread_or_task() -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return f"task {task.get_name()!r}" if task is not None else f"thread {threading.current_thread().name!r}"


@contextmanager
def set_var(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable for the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def in_episode(owner: Owner) -> AbstractContextManager[None]:
    """The block runs in `owner`; None for no episode, as policy and environment do."""
    return set_var(_current, owner)


def iterate_in_episode(source: Iterator[Any], episode: Owner) -> Iterator[Any]:
    """Iterate over `source`, computing each item in `episode`. A generator alone has its caller's context."""
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


async def aiterate_in_episode(source: AsyncIterator[Any], episode: Owner) -> AsyncIterator[Any]:
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


def dispatch(owner: type | ModuleType, name: str, handler: Handler, lookup: Callable[[], Any] = guarded_episode) -> None:
    """Patch `owner.name` to call `handler` if `lookup()` returns an episode; idempotent.

    If `owner` is a module, `name` is a function. Raises `ConfigurationError` if the installed version has no such method.
    """
    original = owner.__dict__.get(name)
    if original is None:
        raise ConfigurationError(
            f"{owner!r} has no method {name!r} in the installed version, which simulation needs: "
            "install a version of langchain-core and langgraph that pyproject.toml names"
        )
    if hasattr(original, "__dreamgym__") or not callable(original):
        return
    if name.endswith("_v3"):  # without LangChain's beta warning
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
    """`owner` and all its current subclasses. One with several bases may occur more than once."""
    derived: type
    yield owner
    for derived in type.__subclasses__(owner):
        yield from subclasses(derived)


# --- threads, pools and queues ------------------------------------------------------------------------------------------------

_starting_thread: ContextVar[bool] = ContextVar("dreamgym_starting_thread", default=False)
"""True while a pool starts its threads, which belong to no episode: only the work that they are given does."""
_CREATOR, _PRODUCERS = "_dreamgym_episode", "_dreamgym_producers"
"""Attributes of a queue: the episode that created it, and `id` of an item -> (item, episode that put it)."""
THREADS = ThreadPoolExecutor(1024, thread_name_prefix="dreamgym")
"""Executor of all episodes; a loop's default one has too few threads for hundreds of them."""


def patch_threads() -> None:
    """Patch what starts threads and submits work to them; idempotent."""
    dispatch(threading.Thread, "start", _start, _owner)
    dispatch(ThreadPoolExecutor, "submit", _submit, _owner)
    dispatch(ThreadPool, "__init__", _make_pool, _owner)
    for name in ("apply_async", "_map_async", "imap", "imap_unordered"):  # every other method calls one of these
        dispatch(Pool, name, _submit_to_thread_pool, _owner)
    dispatch(BaseEventLoop, "create_task", _create_task, _owner)
    dispatch(BaseEventLoop, "run_in_executor", _run_in_executor)
    for kind, put in ((queue.Queue, "put"), (asyncio.Queue, "put_nowait")):
        dispatch(kind, "__init__", _create_queue, _owner)
        dispatch(kind, put, _put, lambda: True)


def serve_producers() -> None:
    """Let long-lived threads and tasks process a queue's items for the only running episode."""
    kinds: tuple[type, ...] = queue.Queue, queue.LifoQueue, queue.PriorityQueue
    for kind in (*kinds, asyncio.Queue, asyncio.LifoQueue, asyncio.PriorityQueue):
        dispatch(kind, "_get", _take, lambda: True)


def _owner() -> ContextEpisode | None:
    """The episode that owns threads which this code starts; None in production."""
    episode = guarded_episode()
    return episode if episode is not None and episode.owns_threads else None


def _copy_context() -> Context:
    """A copy of this context for new work, with the line that starts it."""
    context = copy_context()
    context.run(started_by.set, user_line())
    return context


def _start(episode: ContextEpisode, original: Method, thread: threading.Thread, args: Args, kwargs: Kwargs) -> Any:
    if not _starting_thread.get():
        thread.run = functools.partial(_run, _copy_context(), thread.run)  # type: ignore[method-assign]
    return original(thread)


def _run(context: Context, run: Callable[[], None]) -> None:
    """Run a thread. If the guard stops it, log one line: the episode has recorded the rest."""
    try:
        context.run(run)
    except (RealAccessBlocked, EpisodeBroken) as stopped:
        logger.warning("%s, started at %s, has ended: %s", _thread_or_task(), context[started_by], stopped)


def _submit(episode: ContextEpisode, original: Method, pool: ThreadPoolExecutor, args: Args, kwargs: Kwargs) -> Any:
    with set_var(_starting_thread, True):
        return original(pool, _copy_context().run, *args, **kwargs)


def _make_pool(episode: ContextEpisode, original: Method, pool: ThreadPool, args: Args, kwargs: Kwargs) -> Any:
    args, kwargs = _in_context(args, kwargs)
    with set_var(_starting_thread, True):
        return original(pool, *args, **kwargs)


def _submit_to_thread_pool(episode: ContextEpisode, original: Method, pool: Pool, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(pool, ThreadPool):
        args, kwargs = _in_context(args, kwargs)
    return original(pool, *args, **kwargs)


def _in_context(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Wrap functions for a pool in this context. They raise only `Exception`s: others would end the pool's thread."""
    context = _copy_context()

    def owned(value: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return context.copy().run(value, *args, **kwargs)
            except (RealAccessBlocked, EpisodeBroken) as stopped:  # recorded by the episode
                raise RuntimeError(str(stopped)) from stopped

        return call if callable(value) else value

    return tuple(map(owned, args)), {name: owned(value) for name, value in kwargs.items()}


def _create_task(episode: ContextEpisode, original: Method, loop: BaseEventLoop, args: Args, kwargs: Kwargs) -> Any:
    with set_var(started_by, user_line()):
        return original(loop, *args, **kwargs)


def _run_in_executor(episode: ContextEpisode, original: Method, loop: BaseEventLoop, args: Args, kwargs: Kwargs) -> Any:
    _, pool, *rest = inspect.signature(original).bind(loop, *args, **kwargs).args
    return original(loop, THREADS if pool is None and episode.guard is not None else pool, *rest)


def _create_queue(episode: ContextEpisode, original: Method, created: Any, args: Args, kwargs: Kwargs) -> None:
    original(created, *args, **kwargs)
    setattr(created, _CREATOR, episode)


def _put(_: bool, original: Method, jobs: Any, args: Args, kwargs: Kwargs) -> Any:
    """Put an item. Refuse work for a queue of another run, where another policy would answer it."""
    item, owner = args[0] if args else kwargs["item"], _owner()
    if getattr(jobs, _CREATOR, None) is not owner and _is_work(item):
        caller = next(frame for frame in frames() if frame.f_globals["__name__"] not in (__name__, "queue", "asyncio.queues"))
        if users_frame(caller):
            served = hasattr(type(jobs)._get, "__dreamgym__")
            if not served or in_flight != {owner}:
                raise OwnerUnknown(_OF_ANOTHER_RUN.format(user_line(), _ONE_IN_A_WORKER if served else _BY_ITS_PATH))
            vars(jobs).setdefault(_PRODUCERS, {})[id(item)] = item, owner
    return original(jobs, *args, **kwargs)


_OF_ANOTHER_RUN = (
    "{} gives work to a queue of another run (a dreamed episode, or production), where another policy would answer it: create "
    "queue and worker anew in every run, give the work to a pool's submit, or {}"
)
_ONE_IN_A_WORKER = "play one episode in a worker at a time (Settings(concurrency=), at most the number of cores)"
_BY_ITS_PATH = "give the agent by its path (FILE.py:NAME): in a worker behind the wall it can be played, one episode at a time"


def _take(_: bool, original: Method, jobs: Any, args: Args, kwargs: Kwargs) -> Any:
    """Get an item. Its thread or task then runs in the episode that put it."""
    item, current = original(jobs), _current.get()
    _, producer = vars(jobs).get(_PRODUCERS, {}).pop(id(item), (None, current))
    if producer is not current and current in in_flight:
        raise OwnerUnknown(f"{user_line()} takes work that another episode has put into a queue: {_ONE_IN_A_WORKER}")
    _current.set(producer)
    return item


_ANSWERED_BY = (Future, asyncio.Future, threading.Event, asyncio.Event, queue.Queue, asyncio.Queue)


def _is_work(item: Any) -> bool:
    """True if an item contains something to call, or to put an answer into. Plain data is no work."""
    fields = vars(item).values() if hasattr(item, "__dict__") else ()
    parts = (item, *(item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()))
    return any(map(callable, parts)) or any(isinstance(each, _ANSWERED_BY) for each in (*parts, *fields))


# --- deferred calls -----------------------------------------------------------------------------------------------------------


def patch_deferred() -> None:
    """Patch what registers deferred calls; once per process."""
    dispatch(ThreadPoolExecutor, "__init__", _create_executor, _owner)
    dispatch(Future, "add_done_callback", _add_done_callback, _owner)
    for kind in (weakref.finalize, Finalize):
        dispatch(kind, "__call__", _finalize)
    gc.callbacks.append(_around_collection)


def _create_executor(episode: ContextEpisode, original: Method, pool: ThreadPoolExecutor, args: Args, kwargs: Kwargs) -> None:
    original(pool, *args, **kwargs)
    if pool._initializer is not None:
        pool._initializer = functools.partial(_copy_context().run, pool._initializer)


def _add_done_callback(episode: ContextEpisode, original: Method, future: Future[Any], args: Args, kwargs: Kwargs) -> None:
    function, context = args[0] if args else kwargs["fn"], _copy_context()

    def call(done: Future[Any]) -> None:
        with suppress(RealAccessBlocked):  # recorded by the guard; the thread may be production's
            context.copy().run(function, done)

    return original(future, call)


def _finalize(episode: ContextEpisode, original: Method, finalizer: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a finaliser outside of the episode if Python calls it. Python passes the dead reference, code does not."""
    return run_in(None if args else episode, original, finalizer, *args, **kwargs)


def run_in(episode: ContextEpisode | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` in `episode`, in a new context. Setting a variable in a garbage collection crashes Python 3.11."""
    context = copy_context()
    context.run(_current.set, episode)
    return context.run(function, *args, **kwargs)


_collecting_thread = 0
"""Id of the thread that collects garbage, 0 if none. There is one collection at a time."""


def is_collecting() -> bool:
    """True if this thread collects garbage, so that the running code is a finaliser."""
    return _collecting_thread == threading.get_ident()


def _around_collection(phase: str, info: Any) -> None:
    global _collecting_thread
    _collecting_thread = threading.get_ident() if phase == "start" else 0
