"""`Prompter`: prompts a chat model, parses its answers and caches them."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from hashlib import sha256
from threading import Lock
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from dreamgym_lg.dream.parts import Episode
from dreamgym_lg.dream.prompts import bind_schema
from dreamgym_lg.errors import ConfigurationError, ContextExceeded, PredictionFailed
from dreamgym_lg.event_loop import finish_in_loop, lasting_loop
from dreamgym_lg.hosted import APART, Chat, Hosted, hosted_for, load_chat_model, name_of
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.text import split_thought
from dreamgym_lg.token_recorder import unrecorded

Value = TypeVar("Value")

_MAX_ANSWERS = 100_000
_LOOP = "dreamgym-prompts"


class Prompter:
    """A chat model at temperature 0, and a cache of its answers.

    Args:
        model: A chat model or its name; None for one that is yet to be trained.
        hosted: Limits, budget and file of answers. Default: `Hosted()` for a model that takes a key, else none.
        replay_buffer: A hosted model's answers are stored beside its file, unless `hosted` has a file.
        retries: Maximum further tries after an unreadable answer; each tells the model the reason.

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
        self.hosted, self.retries, self._lock = hosted_for(model, hosted, replay_buffer), retries, Lock()
        self.renew(name_of(model), model)

    def renew(self, version: str, model: BaseChatModel | None) -> None:
        """Replace the model and forget all answers, those under way included."""
        with self._lock:
            self.version, self.model = version, model
            self._answers: dict[str, Future[Any]] = {}

    async def ask(
        self,
        messages: Sequence[BaseMessage],
        read: Callable[[str], Value],
        *,
        prompt: str,
        schema: Mapping[str, Any] | None = None,
    ) -> Value:
        """The answer, parsed by `read`. The same prompt is asked once, even from several event loops at once.

        Args: `prompt`, name and version of the prompt; `schema`, JSON schema of the model's structured output.

        Raises `PredictionFailed` after `retries` unreadable answers, and what `Hosted.aask` raises.
        """
        if self.model is None:
            raise ConfigurationError("there is no language model yet: this part prepares training data and cannot answer")
        parts = (name_of(self.model), prompt, self.version, *(message.text for message in messages))
        key = sha256("".join(f"{len(part)}:{part}" for part in parts).encode("utf-8", "replace")).hexdigest()
        place, chat = f"{os.getpid()}/{key}", self.model if schema is None else bind_schema(self.model, schema)
        with self._lock:
            answers = self._answers
            if (answering := answers.get(place)) is None:  # `place` has the process id: a forked child has no such loop
                answer = self._answer(key, chat, messages, read)
                answering = asyncio.run_coroutine_threadsafe(answer, lasting_loop(_LOOP))
                add_to_cache(answers, place, answering, _MAX_ANSWERS)
        try:
            value: Value = await asyncio.shield(asyncio.wrap_future(answering))
        except BaseException:
            with self._lock:  # forget a failed answer, so that later calls ask again
                if answering.done() and answers.get(place) is answering:
                    del answers[place]
            raise
        return value

    async def _answer(self, key: str, chat: Chat, messages: Sequence[BaseMessage], read: Callable[[str], Value]) -> Value:
        if self.hosted is not None and (stored := self.hosted.recall(key)) is not None:
            with suppress(PredictionFailed):
                return read(stored)
        value, text = await ask_until_read(chat, messages, read, hosted=self.hosted, retries=self.retries)
        if self.hosted is not None:
            self.hosted.remember(key, text)
        return value


class ChatModelPart:
    """A part of a dream that prompts a chat model."""

    prompter: Prompter

    @property
    def model(self) -> BaseChatModel | None:
        """The chat model that answers."""
        return self.prompter.model

    @property
    def hosted(self) -> Hosted | None:
        return self.prompter.hosted


def finish_prompts() -> None:
    """Wait for calls under way, so that their answers, which cost money, are stored."""
    finish_in_loop(_LOOP)


async def ask_until_read(
    chat: Chat, messages: Sequence[BaseMessage], read: Callable[[str], Value], *, hosted: Hosted | None, retries: int
) -> tuple[Value, str]:
    """The answer, parsed by `read`, and its text. Unreadable ones are asked again up to `retries` times."""
    messages = list(messages)
    while True:
        with unrecorded():
            answer = await (hosted.aask(chat, messages) if hosted is not None else chat.ainvoke(messages, APART))
        try:
            return read(text := split_thought(answer.text)[1]), text
        except PredictionFailed as error:
            if retries <= 0:
                raise
            retries -= 1
            text = answer.text or "(nothing)"  # providers refuse an empty message
            messages += [AIMessage(text), HumanMessage(f"That could not be read: {error}. Answer again, in the form.")]


def add_to_cache(cache: dict[Any, Value], key: Any, value: Value, limit: int) -> None:
    """Put a value into a dict that forgets its oldest beyond `limit`."""
    if len(cache) >= limit:
        cache.pop(next(iter(cache)), None)
    cache[key] = value


@contextmanager
def fail_if_prompt_too_long(episode: Episode) -> Iterator[None]:
    """Turn `ContextExceeded` into `PredictionFailed`, except at the first step: then the settings are wrong."""
    try:
        yield
    except ContextExceeded as error:
        if not episode.steps:
            raise
        raise PredictionFailed(f"the dreamed episode has outgrown the experience model: {error}") from error
