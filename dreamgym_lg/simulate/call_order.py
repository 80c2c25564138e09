"""Makes the tool calls of one reply reach the environment one by one, in order."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from dreamgym_lg.errors import ConfigurationError

ABSENT_SECONDS = 1.0
"""Longest wait in seconds for an earlier call of the same reply that has not begun: a person may have refused it."""


class CallOrder:
    """The order of one episode's tool calls. Calls without an id, made by the agent's code, have no place in it."""

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
        """Add the calls of a reply, in order. Small models repeat ids, over replies and within one."""
        self._replies += 1
        self._begun.difference_update(ids)
        self._ended.difference_update(ids)
        for place, call_id in reversed(list(enumerate(ids))):  # of calls with one id, the first place counts
            self._earlier[call_id] = tuple(earlier for earlier in ids[:place] if earlier != call_id)
            self._places[call_id] = self._replies, place

    def place(self, call_id: str | None) -> tuple[int, int] | None:
        """(number of the reply, position in it) of a call; None if unknown."""
        return self._places.get(call_id or "")

    def refuse(self, ids: Iterable[str]) -> None:
        """Let no call wait for these, which a person has refused."""
        self._ended.update(ids)

    @contextmanager
    def running(self, call_id: str | None) -> Iterator[None]:
        """Context of one call; later calls of the same reply wait for its end."""
        self._begun.add(call_id or "")
        try:
            yield
        finally:
            self._ended.add(call_id or "")

    @contextmanager
    def turn(self, call_id: str | None) -> Iterator[None]:
        """Hold the environment in the block, after earlier calls of the reply have ended.

        On an event loop it does not wait for these. Raises `ConfigurationError` where it would deadlock.
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
        """A function that tries to take the turn. It fails while an earlier call may still run."""
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
