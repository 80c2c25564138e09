"""`Prompter`: prompts a chat model, reads the answer, remembers it, and asks each prompt once."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from dreamgym_lg.dream.parts import Episode
from dreamgym_lg.dream.prompts import bind_schema
from dreamgym_lg.errors import ConfigurationError, ContextExceeded, PredictionFailed
from dreamgym_lg.hosted.chat_model import APART, Chat, load_chat_model, name_of
from dreamgym_lg.hosted.hosted import Hosted, hosted_for
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.token_recorder import unrecorded

Value = TypeVar("Value")

_MAX_ANSWERS = 100_000


class Prompter:
    """A chat model at temperature 0 and its answers so far, shared by the parts of a dream that it plays.

    Args:
        model: A chat model or its name; None for one that is yet to be trained.
        hosted: Limits, budget and file of answers. Default: `Hosted()` for a model that takes a key, else none.
        replay_buffer: Beside its file, answers of a hosted model are kept, unless `hosted` has a file.
        retries: Further tries after an answer that cannot be read, each with the reason.

    Raises `ConfigurationError` for something else than a chat model; what `load_chat_model` raises.
    """

    def __init__(
        self,
        model: BaseChatModel | str | None,
        *,
        hosted: Hosted | None = None,
        replay_buffer: ReplayBuffer | None = None,
        retries: int = 1,
    ) -> None:
        model = load_chat_model(model) if isinstance(model, str) else model
        if model is not None and not isinstance(model, BaseChatModel):
            raise ConfigurationError(f"{model!r} is no chat model; give one, or its name")
        self.hosted, self.retries = hosted_for(model, hosted, replay_buffer), retries
        self._lock = threading.Lock()
        self.renew(name_of(model), model)

    def renew(self, version: str, model: BaseChatModel | None) -> None:
        """Take this model from now on and forget all answers, those under way included. Args: `version`, names its weights."""
        with self._lock:
            self.version, self.model = version, model
            self._chats: dict[str, Chat] = {}
            self._answers: dict[str, Any] = {}
            self._under_way: dict[str, asyncio.Task[Any]] = {}

    async def ask(
        self,
        messages: Sequence[BaseMessage],
        read: Callable[[str], Value],
        *,
        prompt: str,
        schema: Mapping[str, Any] | None = None,
    ) -> Value:
        """The answer as `read` takes it. The same prompt at the same time is one call, in whatever event loops.

        Args: `prompt`, its name and version; `schema`, of the model's structured output.

        Raises `PredictionFailed` after `retries` unreadable answers, `ConfigurationError` without a model, what `Hosted.aask`
        raises.
        """
        parts = (name_of(self.model), prompt, self.version, *(message.text for message in messages))
        key = sha256("".join(f"{len(part)}:{part}" for part in parts).encode("utf-8", "replace")).hexdigest()
        while True:
            with self._lock:
                if key in self._answers:
                    value: Value = self._answers[key]
                    return value
                task = self._task(key, messages, read, schema)
            try:
                return await _result(task)
            except asyncio.CancelledError:
                if (current := asyncio.current_task()) is None or current.cancelling():
                    raise
                # the task's own event loop has ended: once more, in this one

    def _task(
        self, key: str, messages: Sequence[BaseMessage], read: Callable[[str], Value], schema: Mapping[str, Any] | None
    ) -> "asyncio.Task[Value]":
        """The task that asks, of whoever came first."""
        under_way, place = self._under_way, f"{os.getpid()}/{key}"  # a forked child has no loop to wait for
        task = under_way.get(place)
        if task is None or task.done() or not task.get_loop().is_running():
            answering = self._answer(key, self._chat(schema), messages, read, self._answers)
            task = under_way[place] = asyncio.create_task(answering)
            task.add_done_callback(lambda _: under_way.pop(place, None))
        return task

    async def _answer(
        self,
        key: str,
        chat: Chat,
        messages: Sequence[BaseMessage],
        read: Callable[[str], Value],
        answers: dict[str, Any],
    ) -> Value:
        if self.hosted is not None and (stored := self.hosted.recall(key)) is not None:
            with suppress(PredictionFailed):  # what has been recorded since may contradict it
                return self._keep(answers, key, read(stored))
        value, text = await ask_until_read(chat, messages, read, hosted=self.hosted, retries=self.retries)
        if self.hosted is not None:
            self.hosted.remember(key, text)
        return self._keep(answers, key, value)

    def _keep(self, answers: dict[str, Any], key: str, value: Value) -> Value:
        with self._lock:
            keep(answers, key, value, _MAX_ANSWERS)
        return value

    def _chat(self, schema: Mapping[str, Any] | None) -> Chat:
        if self.model is None:
            raise ConfigurationError("there is no language model yet: this part prepares training data and cannot answer")
        if schema is None:
            return self.model
        title = str(schema["title"])
        if title not in self._chats:
            self._chats[title] = bind_schema(self.model, schema)
        return self._chats[title]


async def _result(task: "asyncio.Task[Value]") -> Value:
    """What a task of any event loop gives; it goes on where the one that waits is cancelled."""

    async def wait() -> Value:
        return await asyncio.shield(task)

    if task.get_loop() is asyncio.get_running_loop():
        return await wait()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(wait(), task.get_loop()))


async def ask_until_read(
    chat: Chat, messages: Sequence[BaseMessage], read: Callable[[str], Value], *, hosted: Hosted | None, retries: int
) -> tuple[Value, str]:
    """The answer as `read` takes it, and its text; asked for again, with the reason, up to `retries` times."""
    messages = list(messages)
    for attempt in range(retries + 1):
        with unrecorded():
            answer = await (hosted.aask(chat, messages) if hosted is not None else chat.ainvoke(messages, APART))
        try:
            return read(answer.text), answer.text
        except PredictionFailed as error:
            if attempt == retries:
                raise
            text = answer.text or "(nothing)"  # providers refuse an empty message
            messages += [AIMessage(text), HumanMessage(f"That could not be read: {error}. Answer again, in the form.")]
    raise AssertionError("unreachable: the last attempt raises")


def keep(cache: dict[Any, Value], key: Any, value: Value, limit: int) -> None:
    """Put a value into a dict that forgets its oldest beyond `limit`."""
    if len(cache) >= limit:
        cache.pop(next(iter(cache)), None)
    cache[key] = value


@contextmanager
def outgrown(episode: Episode) -> Iterator[None]:
    """Turn an episode that outgrows a model's context into `PredictionFailed`: played again it would do so again.

    A first prompt that does not fit is the settings' fault, and stays a `ContextExceeded`.
    """
    try:
        yield
    except ContextExceeded as error:
        if not episode.steps:
            raise
        raise PredictionFailed(f"the dreamed episode has outgrown the experience model: {error}") from error
