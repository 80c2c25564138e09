"""Which episode the running code belongs to, and what the patched classes ask of it.

One ContextVar holds the episode: LangGraph copies the context into every task and thread, so that concurrent episodes stay
apart and production calls in between see none at all.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel

from dreamgym_lg.simulate.call_order import CallOrder, PendingStep

T = TypeVar("T")


class Call(NamedTuple):
    """A production model's call, as a selector sees it."""

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

    def play(self, action: str, call_id: str | None, read: Callable[[str], T]) -> tuple[PendingStep, T]:
        """The environment answers an action; `read` makes of its answer what the graph gets."""

    async def aplay(self, action: str, call_id: str | None, read: Callable[[str], T]) -> tuple[PendingStep, T]:
        """As `play`."""

    def add_step(self, action: str, answer: str, call_id: str | None, *, valid: bool = True) -> PendingStep:
        """Record a call that the environment did not answer."""

    def twin(self, graph: Pregel) -> Pregel:
        """The graph as the episode runs it."""


_active: ContextVar[ActiveEpisode | None] = ContextVar("dreamgym_episode", default=None)


def active() -> ActiveEpisode | None:
    """The episode this code runs in; None in production, and inside the policy and the environment themselves."""
    return _active.get()


@contextmanager
def set_var(variable: ContextVar[T], value: T) -> Iterator[None]:
    """The variable has this value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def in_episode(episode: ActiveEpisode | None) -> AbstractContextManager[None]:
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
