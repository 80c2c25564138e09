"""Which episode the running code belongs to, and what the patched classes ask of it.

One ContextVar holds the episode: LangGraph copies the context into every task and thread, so that concurrent episodes stay
apart and production calls in between see none at all. Threads and tasks that the graph starts by itself may outlive their
episode and be given work by others: there it holds a `Worker`, which knows whose work is at hand.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel

from dreamgym_lg.errors import OwnerUnknown
from dreamgym_lg.simulate.call_order import CallOrder, PendingStep
from dreamgym_lg.types import ActKind

T = TypeVar("T")


class EpisodeBroken(BaseException):
    """Ends a graph whose world has failed or ended, past every `except Exception`; `cause` or `last` of the episode say why."""


class Call(NamedTuple):
    """A production model's call, as a route sees it."""

    node: str
    """Name of the graph's node that made it."""
    namespace: str
    """LangGraph's checkpoint namespace: the path of nested graphs."""
    agent: str
    """`name=` of the `create_agent` that made it."""
    model: str
    streamed: bool


class AccessGuard(Protocol):
    """What stands between an episode's code and the real world."""

    def check(self, event: str, args: Sequence[Any]) -> None:
        """Raise `RealAccessBlocked` unless this audit event of Python, with its arguments, may happen."""


class ActiveEpisode(Protocol):
    """What the patched classes ask of the episode that the running code belongs to."""

    @property
    def policy(self) -> BaseChatModel:
        """Answers the model calls that the episode selects."""

    @property
    def guard(self) -> AccessGuard | None:
        """None where the real world may be touched."""

    @property
    def owns_threads(self) -> bool:
        """Whether threads and pool work that its code starts belong to it; in production they are left as they are."""

    @property
    def ended(self) -> bool:
        """Its block was left: whatever of its code still runs is answered by nobody."""

    @property
    def graph(self) -> object:
        """What runs: a graph, or an object that holds one."""

    @property
    def call_order(self) -> CallOrder: ...

    def selects(self, call: Call) -> bool:
        """Whether the policy answers this call."""

    def register_tools(self, tools: Sequence[dict[str, Any]]) -> None:
        """The policy was shown these tools (OpenAI's form)."""

    def record_call(self, call: Call, messages: Sequence[BaseMessage]) -> None:
        """The policy answered this call with these messages."""

    def passes(self, tool: BaseTool) -> bool:
        """Whether this tool's body runs."""

    def runs_anyway(self, tool: BaseTool) -> bool:
        """Whether this tool's body runs in a dream too."""

    def owner_of_body(self, tool: BaseTool) -> "ActiveEpisode | None":
        """The episode that the body of a tool that runs belongs to; None: production."""

    def play(self, action: str, call_id: str | None, read: Callable[[str], T], *, line: str) -> tuple[PendingStep, T]:
        """The environment answers an action; `read` makes of its answer what the graph gets."""

    async def aplay(self, action: str, call_id: str | None, read: Callable[[str], T], *, line: str) -> tuple[PendingStep, T]:
        """As `play`."""

    def add_step(self, action: str, answer: str, call_id: str | None, *, valid: bool = True, line: str) -> PendingStep:
        """Record a call that the environment did not answer."""

    def add_act(self, kind: ActKind, text: str, call_id: str | None = None, *, line: str) -> PendingStep:
        """Record what is no step, as it begins."""

    def twin(self, graph: Pregel) -> Pregel:
        """The graph as the episode runs it."""


class Worker:
    """A thread or task that an episode's code has started, and whose work it does: its episode's, until others give it some.

    Work is known by the queue that brings it (`take`). Without that it does its first episode's, and after that nobody's.

    A thread or task that production has started is `lent`: an episode answers for the models and tools of the work that its
    node gave by a queue; no guard stands there, and once the episode has ended it is production's again.
    """

    def __init__(self, name: str, started_at: str, owners: Sequence[ActiveEpisode | None], *, lent: bool = False) -> None:
        self.name, self.started_at, self.lent = name, started_at, lent
        self._owners = list(owners)
        """Who gave the work at hand; more than one while a batch is collected."""
        self._queues: dict[int, object] = {}
        """Those that have brought an episode's work; kept, since the id of a collected object is used again."""
        self._asked = True

    @property
    def owner(self) -> ActiveEpisode | None:
        """The episode whose guard stands; None where all the work at hand is production's."""
        return None if self.lent else next((owner for owner in self._owners if owner is not None), None)

    @property
    def is_returned(self) -> bool:
        """Lent, and no longer: whoever gave it the work at hand has ended."""
        return self.lent and all(owner is None or owner.ended for owner in self._owners)

    def take(self, queue: object, owner: ActiveEpisode | None) -> None:
        """A queue gave it what `owner` had put there; None: production had.

        A queue that has brought no episode's work yet gives it none of production's either: it brings answers.
        """
        if owner is not None:
            self._queues[id(queue)] = queue
        elif id(queue) not in self._queues:
            return
        collected = [] if self._asked else [other for other in self._owners if other is not owner]
        self._owners, self._asked = [*collected, owner], False

    def start(self, name: str, started_at: str) -> "Worker | None":
        """A thread or task that it starts for the work at hand; None: it is production's."""
        self._asked = True
        return None if self._owners == [None] else Worker(name, started_at, self._owners)

    def ask(self) -> ActiveEpisode | None:
        """Who answers a call for the work at hand. Raises `OwnerUnknown` if it is the work of more than one."""
        self._asked = True
        if len(self._owners) > 1:
            raise OwnerUnknown(
                f"{self.name}, started at {self.started_at}, asks a model or tool for work of more than one run at once "
                "(episodes, or an episode and production), of which each has its own policy: create it anew in every run, or "
                "let it ask for one at a time"
            )
        return self._owners[0]


_active: ContextVar[ActiveEpisode | Worker | None] = ContextVar("dreamgym_episode", default=None)


def holder() -> ActiveEpisode | Worker | None:
    """The episode this code runs in or, in a thread or task that works for one, the worker that it is."""
    found = _active.get()
    return None if isinstance(found, Worker) and found.is_returned else found


def lend(queue: object, owner: ActiveEpisode) -> None:
    """This thread or task is production's, and a queue gave it what a node of `owner` had put there."""
    worker = Worker(_running(), "in production", [owner], lent=True)
    worker.take(queue, owner)
    _active.set(worker)


def active() -> ActiveEpisode | None:
    """The episode this code runs in; None in production, and inside the policy and the environment themselves."""
    found = _active.get()
    return found.owner if isinstance(found, Worker) else found


def answering() -> ActiveEpisode | None:
    """As `active`, where a model, a tool or a graph is called.

    Raises `OwnerUnknown` where the episode has ended: the old policy would answer, perhaps to production.
    """
    found = holder()
    owner = found.ask() if isinstance(found, Worker) else found
    if owner is not None and owner.ended:
        started = f", started at {found.started_at}," if isinstance(found, Worker) else ""
        name = found.name if isinstance(found, Worker) else _running()
        raise OwnerUnknown(
            f"{name}{started} asks a model or tool after the episode that it belongs to has ended, and who gave it the work is "
            "unknown: create it anew in every run, or give it work by a queue.Queue, an asyncio.Queue, or a pool's submit"
        )
    return owner


def _running() -> str:
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


def in_episode(episode: ActiveEpisode | Worker | None) -> AbstractContextManager[None]:
    """The block belongs to `episode`; None: to no episode, as the policy and the environment do."""
    return set_var(_active, episode)


def iterate_in_episode(source: Iterator[Any], episode: ActiveEpisode | None = None) -> Iterator[Any]:
    """The items of `source`, each made inside `episode`: a generator by itself shares its caller's context."""
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


async def aiterate_in_episode(source: AsyncIterator[Any], episode: ActiveEpisode | None = None) -> AsyncIterator[Any]:
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
