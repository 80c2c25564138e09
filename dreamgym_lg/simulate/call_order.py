"""The order of tool calls: those of one reply reach the environment in their order, and no two at once."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import ActKind

ABSENT_SECONDS = 1.0
"""How long a call waits for an earlier one of the same reply that has not begun: a person may have refused it."""


@dataclass(kw_only=True)
class PendingStep:
    """A step or an act whose answer may still change: LangChain words it for the policy once the tool has returned."""

    action: str
    answer: str = ""
    place: tuple[int, int] | None = None
    """Of its call, as `CallOrder.place` says."""
    valid: bool = True
    reasoning: str = ""
    decided_by: str = ""
    line: str = ""
    kind: ActKind | None = None
    """None for a step."""

    def is_before(self, other: "PendingStep") -> bool:
        """Whether one reply asked for both, for this one first."""
        first, second = self.place, other.place
        return first is not None and second is not None and first[0] == second[0] and first[1] < second[1]


class CallOrder:
    """The order of one episode's tool calls. A call is known by its id; one without (called by hand) has no place in it."""

    def __init__(self) -> None:
        self._replies = 0
        self._places: dict[str, tuple[int, int]] = {}
        self._earlier: dict[str, tuple[str, ...]] = {}
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._asking = threading.Lock()
        self._asked_on: asyncio.AbstractEventLoop | None = None

    def add_reply(self, ids: Sequence[str]) -> None:
        """The policy asked for these calls, in this order; small models use the same ids in every reply, and within one."""
        self._replies += 1
        self._begun.difference_update(ids)
        self._ended.difference_update(ids)
        for place, asked in reversed(list(enumerate(ids))):  # of calls with one id, the first place counts
            self._earlier[asked] = tuple(earlier for earlier in ids[:place] if earlier != asked)
            self._places[asked] = self._replies, place

    def place(self, call_id: str | None) -> tuple[int, int] | None:
        """Number of the reply that asked for a call, and the call's number in it."""
        return self._places.get(call_id or "")

    def refuse(self, ids: Iterable[str]) -> None:
        """These calls are answered already and never begin, as a person has refused them: no other waits for them."""
        self._ended.update(ids)

    @contextmanager
    def running(self, call_id: str | None) -> Iterator[None]:
        """The block is this call, from its begin to its end; the next call of the same reply waits for the end."""
        self._begun.add(call_id or "")
        try:
            yield
        finally:
            self._ended.add(call_id or "")

    @contextmanager
    def turn(self, call_id: str | None) -> Iterator[None]:
        """Wait until this call may ask the environment; the block asks.

        On an event loop's thread nothing else goes on while it waits, so it waits for no other call there. Raises
        `ConfigurationError` where it would wait for ever.
        """
        loop = _running_loop()
        if loop is not None and self._asked_on is loop:
            raise ConfigurationError(
                "a tool was called synchronously in async code while another call of the same episode waits for its answer: "
                "call `await tool.ainvoke(...)` there, or `asyncio.to_thread`"
            )
        free = self._is_free(call_id) if loop is None else self._asking.acquire
        for seconds in _pauses(free):
            time.sleep(seconds)
        try:
            yield
        finally:
            self._asking.release()

    @asynccontextmanager
    async def aturn(self, call_id: str | None) -> AsyncIterator[None]:
        """As `turn`."""
        for seconds in _pauses(self._is_free(call_id)):
            await asyncio.sleep(seconds)
        self._asked_on = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._asked_on = None
            self._asking.release()

    def _is_free(self, call_id: str | None) -> Callable[[], bool]:
        """A function that takes the turn if every earlier call of the same reply has ended, or will not come."""
        since = time.monotonic()

        def free() -> bool:
            waiting = [earlier for earlier in self._earlier.get(call_id or "", ()) if earlier not in self._ended]
            if any(earlier in self._begun for earlier in waiting):
                return False
            if waiting and time.monotonic() - since < ABSENT_SECONDS:
                return False
            return self._asking.acquire(blocking=False)

        return free


def _pauses(free: Callable[[], bool]) -> Iterator[float]:
    """Seconds to wait before each further try."""
    seconds = 0.0005
    while not free():
        yield seconds
        seconds = min(2 * seconds, 0.02)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
