"""Orders tool calls: those of one reply reach the environment one after the other."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from dreamgym_lg.errors import ConfigurationError

ABSENT_SECONDS = 1.0
"""Longest wait for an earlier call of the same reply that has not begun. A person may have refused it."""


class CallOrder:
    """The order of one episode's tool calls. A call is known by its id; one without (called by hand) has no place in it."""

    def __init__(self) -> None:
        self._replies = 0
        self._places: dict[str, tuple[int, int]] = {}
        self._earlier: dict[str, tuple[str, ...]] = {}
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._turn = threading.Lock()
        self._turn_loop: asyncio.AbstractEventLoop | None = None
        """The event loop on which a call has its turn."""

    def add_reply(self, ids: Sequence[str]) -> None:
        """Add a reply's calls, in their order. Small models use the same ids in every reply, and within one."""
        self._replies += 1
        self._begun.difference_update(ids)
        self._ended.difference_update(ids)
        for place, call_id in reversed(list(enumerate(ids))):  # of calls with one id, the first place counts
            self._earlier[call_id] = tuple(earlier for earlier in ids[:place] if earlier != call_id)
            self._places[call_id] = self._replies, place

    def place(self, call_id: str | None) -> tuple[int, int] | None:
        """Number of the reply that asked for a call, and the call's number in it."""
        return self._places.get(call_id or "")

    def refuse(self, ids: Iterable[str]) -> None:
        """Let no other call wait for these. A person has refused them, and they never begin."""
        self._ended.update(ids)

    @contextmanager
    def running(self, call_id: str | None) -> Iterator[None]:
        """The block is this call. The next call of the same reply waits for its end."""
        self._begun.add(call_id or "")
        try:
            yield
        finally:
            self._ended.add(call_id or "")

    @contextmanager
    def turn(self, call_id: str | None) -> Iterator[None]:
        """Wait until this call may ask the environment; the block asks. On an event loop it waits for no other call.

        Raises `ConfigurationError` where it would wait for ever.
        """
        try:
            loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not None and self._turn_loop is loop:
            raise ConfigurationError(
                "a tool was called synchronously in async code while another call of the same episode waits for its answer: "
                "call `await tool.ainvoke(...)` there, or `asyncio.to_thread`"
            )
        for seconds in _pauses(self._turn.acquire if loop is not None else self._take_turn(call_id)):
            time.sleep(seconds)
        try:
            yield
        finally:
            self._turn.release()

    @asynccontextmanager
    async def aturn(self, call_id: str | None) -> AsyncIterator[None]:
        """As `turn`."""
        for seconds in _pauses(self._take_turn(call_id)):
            await asyncio.sleep(seconds)
        self._turn_loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._turn_loop = None
            self._turn.release()

    def _take_turn(self, call_id: str | None) -> Callable[[], bool]:
        """A function that takes the turn once no earlier call of its reply may come."""
        since = time.monotonic()

        def take() -> bool:
            waiting = [earlier for earlier in self._earlier.get(call_id or "", ()) if earlier not in self._ended]
            may_come = bool(waiting) and time.monotonic() - since < ABSENT_SECONDS
            return not (may_come or self._begun.intersection(waiting)) and self._turn.acquire(blocking=False)

        return take


def _pauses(take: Callable[[], bool]) -> Iterator[float]:
    """Seconds to wait before each further try."""
    seconds = 0.0005
    while not take():
        yield seconds
        seconds = min(2 * seconds, 0.02)
