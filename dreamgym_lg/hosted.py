"""Hosted chat models: by name, within a budget, their answers kept on disk, without keys."""

import asyncio
import re
import sqlite3
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from json import JSONDecodeError
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.cache.sqlite import SqliteCache

from dreamgym_lg.errors import BudgetExceeded, ConfigurationError, DreamGymError, MissingDependency, ModelUnavailable
from dreamgym_lg.event_loop import lasting_loop
from dreamgym_lg.redaction import answers_beside, hide_files, redact, secrets
from dreamgym_lg.replay.buffer import ReplayBuffer

Chat = Runnable[Any, AIMessage]
"""A chat model, or one with arguments bound to it."""

EXAMPLE_MODEL = "openai:gpt-5.4-mini"
"""The small hosted model that help texts name; docs name it too."""

APART: RunnableConfig = {"callbacks": []}
"""Config of a dream's calls. Callbacks and streams of a running agent do not see them."""

MAX_RETRIES, TIMEOUT = 6, 120.0
"""Retries, and seconds of one try, of a model by name. Its provider's client repeats a refused, lost or late call."""


TINKER, TINKER_FILE = "tinker:", "tinker.json"
"""Prefix of the name of a base model on Tinker, and the file that locates trained weights there."""


def is_on_tinker(name: str | Path) -> bool:
    """True for `tinker:MODEL`, and for a folder of a policy whose weights are on Tinker."""
    return str(name).startswith(TINKER) or (Path(name) / TINKER_FILE).is_file()


def load_chat_model(name: str, *, timeout: float = TIMEOUT) -> BaseChatModel:
    """The chat model of a name like `openai:MODEL` (LangChain's `init_chat_model`), at temperature 0.

    Its client tries a call again `MAX_RETRIES` times, and heeds `Retry-After` if its provider does. Raises
    `MissingDependency` saying what to install without `langchain` or the provider's package, `ConfigurationError` for an
    unknown name or a missing key.
    """
    try:
        from langchain.chat_models import init_chat_model

        model: BaseChatModel = init_chat_model(name, temperature=0, max_retries=MAX_RETRIES, timeout=timeout)
    except ImportError as error:
        raise MissingDependency(f"the model {name!r} needs another package; run: {_install(name, str(error))}") from error
    except Exception as error:  # each provider has its own way to say that a key is missing
        raise ConfigurationError(f"the model {name!r} cannot be used: {error}") from error
    return model


def _install(name: str, message: str) -> str:
    """The command that installs a provider's package, which LangChain's error message names."""
    provider = name.partition(":")[0] if ":" in name else "openai"
    named = re.search(r"langchain-[a-z-]+", message)
    package = named[0] if named else f"langchain-{provider.replace('_', '-')}"
    return "pip install " + ("'.[openai]' in the clone" if package == "langchain-openai" else f"langchain {package}")


def name_of(model: object) -> str:
    """The model's name as its server knows it, else its class."""
    names = (getattr(model, attribute, None) for attribute in ("model_name", "model", "model_id", "deployment_name"))
    return next((name for name in names if isinstance(name, str) and name), type(model).__name__)


def host_of(model: object) -> str:
    """` at HOST:PORT` of a chat model's own address, else ""."""
    fields = vars(getattr(model, "bound", model))  # the model behind bound arguments
    addresses = (value for name, value in fields.items() if re.search(r"(base|url|endpoint)$", name) and isinstance(value, str))
    hosts = (urlsplit(address).netloc.rpartition("@")[2] for address in addresses)
    return next((f" at {host}" for host in hosts if host), "")


_UNREADABLE = (JSONDecodeError, TypeError, KeyError)
"""Errors of LangChain and the clients for a body that is no answer. No client retries them."""


class Usage(NamedTuple):
    """Calls of hosted models, and what they took."""

    calls: int = 0
    failed: int = 0
    """Calls without an answer: refused, lost, or too slow."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    """In the currency of the prices; 0 without prices."""

    @property
    def limited(self) -> dict[str, float]:
        """The sums that a budget limits: calls, tokens and cost."""
        return {"calls": self.calls, "tokens": self.input_tokens + self.output_tokens, "cost": self.cost}

    def plus(self, other: "Usage") -> "Usage":
        return Usage._make(own + others for own, others in zip(self, other, strict=True))

    def minus(self, other: "Usage") -> "Usage":
        return Usage._make(own - others for own, others in zip(self, other, strict=True))


class Store(SqliteCache[str]):
    """LangGraph's cache of answers, and the sum of spending.

    Raises `ConfigurationError` for a file that cannot be made, or that holds anything else.
    """

    def __init__(self, path: str) -> None:
        try:
            with closing(sqlite3.connect(path)) as connection:
                tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables - {"cache", "spent"}:
                raise sqlite3.DatabaseError("it is another application's file")
            super().__init__(path=path)
            # By default each answer waits for the disk, 5 ms; so only a loss of power can lose the last ones.
            self._conn.executescript("""
                PRAGMA synchronous = NORMAL; PRAGMA busy_timeout = 60000;
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
        """The sum of all that was spent."""
        with self._lock:
            return Usage(*self._conn.execute(f"SELECT {', '.join(Usage._fields)} FROM spent").fetchone())

    def spend(self, usage: Usage) -> None:
        with self._lock, self._conn:
            self._conn.execute(f"UPDATE spent SET {', '.join(f'{name} = {name} + ?' for name in Usage._fields)}", usage)

    def recall(self, key: str) -> str | None:
        """The answer under this key."""
        return self.get([(("answers",), key)]).get((("answers",), key))

    def remember(self, key: str, text: str) -> None:
        self.set({(("answers",), key): (text, None)})


class Hosted:
    """Limits of hosted models, and their answers on disk; several models may share one.

    Args:
        path: An SQLite file that keeps answers and spending over restarts. None: `keep_in` may name one later.
        concurrency: Calls under way at once, over all threads and event loops.
        timeout: Seconds after which a call is given up, the retries of the model's client included.
        prices: Per million (input, output) tokens.
        max_calls, max_tokens, max_cost: The budget, of all that the file has ever seen. Then `BudgetExceeded` is raised; what
            is under way is finished, so that tokens and cost may pass the limit by `concurrency` calls.

    A call that fails is tried again by the model's own client: give the chat model `max_retries=` and `timeout=`
    (`load_chat_model` does). Every call runs in one event loop of its own thread, because clients keep connections that no
    other loop can use. Raises `ConfigurationError` for a file that cannot be used, and for `max_cost` without `prices`.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        concurrency: int = 64,
        timeout: float = 900.0,
        prices: tuple[float, float] | None = None,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        max_cost: float | None = None,
    ) -> None:
        if max_cost is not None and prices is None:
            raise ConfigurationError(f"max_cost={max_cost} needs prices=(input, output), per million tokens")
        if concurrency < 1:
            raise ConfigurationError(f"concurrency={concurrency} has to be at least 1")
        self.timeout, self.prices = timeout, prices or (0.0, 0.0)
        self.limits = {"calls": max_calls, "tokens": max_tokens, "cost": max_cost}
        self.path: str | None = None
        self._store = Store(":memory:")
        self._own = self._reported = Usage()
        self._slots = asyncio.Semaphore(concurrency)
        if path is not None:
            self.keep_in(path)

    def keep_in(self, path: str | PathLike[str]) -> None:
        """Keep answers and spending in this file from now on, unless there is one."""
        if self.path is None:
            store = Store(fspath(path))
            store.spend(self.usage)
            self.path, self._store = fspath(path), store

    @property
    def usage(self) -> Usage:
        """The sum of all calls; with a file, of all that it has ever seen."""
        return self._store.usage()

    def ask(self, model: Chat, messages: Sequence[BaseMessage]) -> AIMessage:
        """One answer. Raises `ModelUnavailable` with the cause and the server, `BudgetExceeded` if the budget is spent."""
        return self._submit(model, messages).result()

    async def aask(self, model: Chat, messages: Sequence[BaseMessage]) -> AIMessage:
        """As `ask`."""
        return await asyncio.wrap_future(self._submit(model, messages))

    def recall(self, key: str) -> str | None:
        """The text remembered under `key`; None if there is none, or no file."""
        return None if self.path is None else self._store.recall(key)

    def remember(self, key: str, text: str) -> None:
        """Keep a text in the file; without one, nothing."""
        if self.path is not None:
            self._store.remember(key, text)

    def price(self, read: float, written: float) -> str:
        """The cost of so many tokens in words, for an estimate."""
        if not any(self.prices):
            return "what that costs is told with Hosted(prices=(input, output))"
        return f"cost {self._cost(read, written):,.4f}"

    def _cost(self, read: float, written: float) -> float:
        return (read * self.prices[0] + written * self.prices[1]) / 1e6

    def pop_metrics(self) -> dict[str, float]:
        """Calls, tokens and cost of this instance since the last time, as metrics."""
        own, reported = self._own, self._reported
        self._reported = own
        return {f"hosted_{name}": value for name, value in own.minus(reported)._asdict().items()}

    def check_budget(self) -> None:
        """Raises `BudgetExceeded` if a limit is reached."""
        spent = self.usage.limited
        for name, limit in self.limits.items():
            if limit is not None and spent[name] >= limit:
                counted = f" ({self.path} counts them)" if self.path else ""
                raise BudgetExceeded(
                    f"{spent[name]:g} of max_{name}={limit:g} are spent{counted}; the answers so far are kept: run again with "
                    f"a larger max_{name}"
                )

    def begin_call(self) -> None:
        """Count a call that begins. Raises `BudgetExceeded` if a limit is reached."""
        self.check_budget()
        self._count(Usage(calls=1))

    def end_call(self, messages: Sequence[BaseMessage], answer: AIMessage | None) -> None:
        """Count the tokens of a call that was begun. Args: `answer`, None for one that failed."""
        self._count(Usage(failed=1) if answer is None else self._tokens(messages, answer))

    def _submit(self, model: Chat, messages: Sequence[BaseMessage]) -> Future[AIMessage]:
        # one loop for all instances: provider packages share their connections between models
        return asyncio.run_coroutine_threadsafe(self._ask(model, list(messages)), lasting_loop("dreamgym-hosted"))

    # --- in the loop's thread: nothing below needs a lock -------------------------------------------------------------------

    async def _ask(self, model: Chat, messages: list[BaseMessage]) -> AIMessage:
        keys = secrets(model)
        try:
            answer = await self._call(model.with_retry(retry_if_exception_type=_UNREADABLE, stop_after_attempt=6), messages)
        except DreamGymError:
            raise
        except Exception as error:
            cause = redact(_describe(error, self.timeout), keys)[:500]
        else:
            text = redact(answer.text, keys)  # a proxy may echo what it was sent
            return answer if text == answer.text else AIMessage(text)
        # outside of the except clause: the error, which may quote a key, is not chained to it
        raise ModelUnavailable(f"the hosted model {name_of(model)!r}{host_of(model)} gave no answer: {cause}")

    async def _call(self, model: Chat, messages: list[BaseMessage]) -> AIMessage:
        async with self._slots:
            self.begin_call()
            answer = None
            try:
                async with asyncio.timeout(self.timeout):
                    answer = await model.ainvoke(messages, APART)
            finally:
                self.end_call(messages, answer)
        return answer

    def _count(self, usage: Usage) -> None:
        self._store.spend(usage)
        self._own = self._own.plus(usage)

    def _tokens(self, messages: Sequence[BaseMessage], answer: AIMessage) -> Usage:
        """Tokens as the server counts them, else an estimate."""
        counted = answer.usage_metadata
        read = counted["input_tokens"] if counted else count_tokens_approximately(messages)
        written = counted["output_tokens"] if counted else count_tokens_approximately([answer])
        return Usage(input_tokens=read, output_tokens=written, cost=self._cost(read, written))


def hosted_for(model: object, hosted: Hosted | None = None, replay_buffer: ReplayBuffer | None = None) -> Hosted | None:
    """`hosted`, or the default for a model that is reached with a key, else None.

    Without a file of its own, it keeps answers and spending beside the replay buffer's (`replay-answers.db`). No agent in
    training may read its file.
    """
    chosen = hosted or (Hosted() if getattr(model, "lc_secrets", None) else None)
    path = replay_buffer.path if replay_buffer is not None else None
    if chosen is not None and path is not None:
        chosen.keep_in(answers_beside(path))
    if chosen is not None and chosen.path not in (None, ":memory:"):
        hide_files(chosen, Path(str(chosen.path)))
    return chosen


def _describe(error: Exception, timeout: float) -> str:
    """The error with its first cause."""
    if type(error) is TimeoutError:
        return f"nothing within {timeout:g} s"
    cause: BaseException = error
    for _ in range(8):  # a chain may be a circle
        cause = cause.__cause__ or cause
    return f"{type(error).__name__}: {error}" + (f" ({type(cause).__name__}: {cause})" if cause is not error else "")
