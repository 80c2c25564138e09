"""Hosted models at scale: bounded concurrency, retries, a budget, remembered answers, and no key in what is written."""

import asyncio
import re
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from os import PathLike, fspath
from typing import Any, NamedTuple, TypeVar

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.utils import count_tokens_approximately
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from dreamgym_lg.errors import BudgetExceeded, ConfigurationError, DreamGymError, ModelUnavailable
from dreamgym_lg.event_loop import lasting_loop
from dreamgym_lg.hosted.chat_model import Chat
from dreamgym_lg.redaction import redact, secrets

T = TypeVar("T")

_RETRIED = (408, 409, 425, 429)
"""Client errors that another try may not meet; those of the server are retried all."""

_STARTS_A_TURN = 8
"""Calls that begin in one turn of the event loop. Of hundreds at once each would else wait until all are made ready."""

_APPLICATION_ID = 0x44476D68


class Usage(NamedTuple):
    """What was asked of hosted models; each attempt is a call."""

    calls: int = 0
    failed: int = 0
    """Calls without an answer: refused, lost, too slow or not to be read by the client."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    """In the currency of the prices; 0 without prices."""

    @property
    def limited(self) -> dict[str, float]:
        """What a budget limits: calls, tokens and cost."""
        return {"calls": self.calls, "tokens": self.input_tokens + self.output_tokens, "cost": self.cost}

    def plus(self, other: "Usage") -> "Usage":
        return Usage(**{name: value + getattr(other, name) for name, value in self._asdict().items()})

    def minus(self, other: "Usage") -> "Usage":
        return Usage(**{name: value - getattr(other, name) for name, value in self._asdict().items()})


class Hosted:
    """How hosted models are asked. One instance may serve several models: they share its slots and its budget.

    Args:
        path: An SQLite file that keeps answers and spending over restarts; None keeps neither.
        concurrency: Calls under way at once, over all threads and event loops.
        attempts: Tries of one call, with exponential backoff and jitter, or as long as `Retry-After` asks for. Create the
            chat model with `max_retries=0`, or its client's own retries multiply these and are not counted.
        timeout: Seconds after which a call is given up and tried again.
        backoff: (first, longest) upper bound of the random wait between tries, in seconds.
        prices: Per million (input, output) tokens.
        max_calls, max_tokens, max_cost: The budget, of all that the file has ever seen. Then `BudgetExceeded` is raised; what
            is under way is finished, so that tokens and cost may pass the limit by `concurrency` calls.

    Every call runs in one event loop of its own thread: clients keep connections that no other loop can use, and a training
    run begins a new loop every iteration.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        concurrency: int = 64,
        attempts: int = 6,
        timeout: float = 120.0,
        backoff: tuple[float, float] = (1.0, 60.0),
        prices: tuple[float, float] | None = None,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        max_cost: float | None = None,
    ) -> None:
        if max_cost is not None and prices is None:
            raise ConfigurationError(f"max_cost={max_cost} needs prices=(input, output), per million tokens")
        if concurrency < 1 or attempts < 1:
            raise ConfigurationError(f"concurrency={concurrency} and attempts={attempts} have to be at least 1")
        self.attempts, self.timeout, self.prices = attempts, timeout, prices or (0.0, 0.0)
        self._wait = wait_random_exponential(multiplier=backoff[0], max=backoff[1])
        self.limits = {"calls": max_calls, "tokens": max_tokens, "cost": max_cost}
        self._slots, self._starting = asyncio.Semaphore(concurrency), asyncio.Semaphore(_STARTS_A_TURN)
        self._keeps = path is not None
        self._ledger = _Ledger(fspath(path) if path is not None else ":memory:")
        self.usage = self._ledger.usage()
        self._taken = self.usage
        self._keys: dict[int, tuple[Chat, set[str]]] = {}

    def ask(self, model: Chat, messages: Sequence[BaseMessage]) -> AIMessage:
        """One answer. Raises `ModelUnavailable` after `attempts` tries, and at once where the request is at fault (401, 400);
        `BudgetExceeded` if the budget is spent."""
        return self._submit(model, messages).result()

    async def aask(self, model: Chat, messages: Sequence[BaseMessage]) -> AIMessage:
        """As `ask`."""
        return await asyncio.wrap_future(self._submit(model, messages))

    def recall(self, key: str) -> str | None:
        """What was remembered under `key`; None if nothing, or without a file."""
        return self._ledger.recall(key) if self._keeps else None

    def remember(self, key: str, text: str) -> None:
        if self._keeps:
            self._ledger.remember(key, text)

    def pop_metrics(self) -> dict[str, float]:
        """Calls, tokens and cost since this was last asked: the metrics of an iteration."""
        now = self.usage
        since = now.minus(self._taken)
        self._taken = now
        return {f"hosted_{name}": value for name, value in since._asdict().items()}

    def _submit(self, model: Chat, messages: Sequence[BaseMessage]) -> Future[AIMessage]:
        # one loop for all instances: provider packages share their connections between models
        return asyncio.run_coroutine_threadsafe(self._ask(model, list(messages)), lasting_loop("dreamgym-hosted"))

    # --- in the loop's thread: nothing below needs a lock -------------------------------------------------------------------

    async def _ask(self, model: Chat, messages: list[BaseMessage]) -> AIMessage:
        return await self.retried(lambda: self._call(model, messages), self._keys_of(model))

    async def retried(self, call: Callable[[], Awaitable[T]], keys: Iterable[str]) -> T:
        """What a call gives in one of `attempts` tries. Raises `ModelUnavailable`, whose text holds none of `keys`."""
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.attempts), wait=self._pause, retry=retry_if_exception(_transient), reraise=True
        )

        async def once() -> T:  # what is no coroutine function, AsyncRetrying would not await
            return await call()

        try:
            return await retrying(once)
        except DreamGymError:
            raise
        except Exception as error:
            tried = retrying.statistics.get("attempt_number", 1)
            text = redact(f"{type(error).__name__}: {error}", keys)
        # outside of the except clause: the cause, which may quote a key, is not chained to it
        raise ModelUnavailable(f"the hosted model gave no answer in {tried} of {self.attempts} attempts: {text[:500]}")

    async def _call(self, model: Chat, messages: list[BaseMessage]) -> AIMessage:
        async with self._slots:
            async with self._starting:
                await asyncio.sleep(0)
            self.check_budget()
            self.usage = self.usage.plus(Usage(calls=1))
            spent = Usage(failed=1)
            try:
                async with asyncio.timeout(self.timeout):
                    answer = await model.ainvoke(messages)
                spent = self._spent(messages, answer)
            finally:
                self.usage = self.usage.plus(spent)
                self._ledger.spend(spent._replace(calls=1))
        clean = redact(answer.text, self._keys_of(model))  # a proxy may echo what it was sent
        return answer if clean == answer.text else AIMessage(clean)

    def _keys_of(self, model: Chat) -> set[str]:
        if id(model) not in self._keys:
            self._keys[id(model)] = model, secrets(model)  # the model is kept: an id is reused once its object is gone
        return self._keys[id(model)][1]

    def check_budget(self) -> int | None:
        """How many further calls `max_calls` allows; None for any number. Raises `BudgetExceeded` if a limit is reached."""
        for what, limit in self.limits.items():
            if limit is not None and (used := self.usage.limited[what]) >= limit:
                raise BudgetExceeded(
                    f"{used:g} of max_{what}={limit:g} are spent; the answers so far are kept: "
                    f"run again with a larger max_{what}"
                )
        most = self.limits["calls"]
        return None if most is None else int(most - self.usage.calls)

    def _spent(self, messages: list[BaseMessage], answer: AIMessage) -> Usage:
        """The tokens as the server counts them, else as they are commonly counted: a budget without a count would never end."""
        counted = answer.usage_metadata
        given = counted["input_tokens"] if counted else count_tokens_approximately(messages)
        got = counted["output_tokens"] if counted else count_tokens_approximately([answer])
        cost = (given * self.prices[0] + got * self.prices[1]) / 1e6
        return Usage(input_tokens=given, output_tokens=got, cost=cost)

    def _pause(self, state: RetryCallState) -> float:
        """Seconds until the next try."""
        error = state.outcome.exception() if state.outcome else None
        asked = getattr(getattr(error, "response", None), "headers", None)
        seconds = asked.get("retry-after", "") if isinstance(asked, Mapping) else ""
        return max(float(self._wait(state)), min(float(seconds), 60.0) if re.fullmatch(r"\d+(\.\d+)?", seconds) else 0.0)


def hosted_for(model: object) -> Hosted | None:
    """The default for a model that is reached with a key; None for one that has none, such as a local one."""
    return Hosted() if getattr(model, "lc_secrets", None) else None


def _transient(error: BaseException) -> bool:
    """Whether another try may go better: everything but a request that the server calls wrong, and errors of our own."""
    ours, status = isinstance(error, DreamGymError) or not isinstance(error, Exception), _status(error)
    return not ours and (not 400 <= status < 500 or status in _RETRIED)


def _status(error: BaseException) -> int:
    """The HTTP status that an error of a provider's client tells of; 0 if none."""
    response = getattr(error, "response", None)
    told = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, Mapping) else None
    found = (getattr(error, "status_code", None), getattr(response, "status_code", None), getattr(error, "code", None), told)
    return next((status for status in found if isinstance(status, int)), 0)


# --- the file ---------------------------------------------------------------------------------------------------------------


class _Ledger:
    """Answers by key, and what was spent, in one SQLite file shared by threads and processes."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        try:
            self._connection = sqlite3.connect(path, timeout=60.0, check_same_thread=False, isolation_level=None)
            (found,) = self._connection.execute("PRAGMA application_id").fetchone()
            (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if found != _APPLICATION_ID and (found or tables):
                raise sqlite3.DatabaseError("it is another application's file")
            self._connection.executescript(f"""
                PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA application_id = {_APPLICATION_ID};
                CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID;
                CREATE TABLE IF NOT EXISTS spent (calls INTEGER, failed INTEGER, input_tokens INTEGER,
                    output_tokens INTEGER, cost REAL);
                INSERT INTO spent SELECT 0, 0, 0, 0, 0.0 WHERE NOT EXISTS (SELECT 1 FROM spent);
            """)
        except sqlite3.Error as error:
            raise ConfigurationError(
                f"{path} cannot hold the answers of a hosted model ({error}): give the path of such a file, or one where no "
                "file exists yet; the replay buffer is a file of its own"
            ) from error

    def usage(self) -> Usage:
        return Usage(*self._rows("SELECT calls, failed, input_tokens, output_tokens, cost FROM spent")[0])

    def spend(self, usage: Usage) -> None:
        self._rows(
            "UPDATE spent SET calls = calls + ?, failed = failed + ?, input_tokens = input_tokens + ?, "
            "output_tokens = output_tokens + ?, cost = cost + ?",
            usage,
        )

    def recall(self, key: str) -> str | None:
        found = self._rows("SELECT text FROM answers WHERE key = ?", (key,))
        return found[0][0] if found else None

    def remember(self, key: str, text: str) -> None:
        self._rows("INSERT INTO answers VALUES (?, ?) ON CONFLICT (key) DO NOTHING", (key, text))

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock, closing(self._connection.cursor()) as cursor:
            return cursor.execute(sql, values).fetchall()
