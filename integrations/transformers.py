"""`LocalChatModel`: any Hugging Face causal language model as a LangChain chat model, made for many episodes at once.

Concurrent calls become one batch, a growing conversation keeps its key-value cache (`integrations/transformers_engine.py`
does both), and every sampled token reaches the episode's `TokenRecorder` as it was sampled.
"""

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, PrivateAttr

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.policy import TokenCall, TokenRecorder

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as error:
    raise MissingDependency.extra("transformers", "train") from error

from dreamgym_lg.integrations.transformers_engine import Engine, Generated, Request

ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


class LocalChatModel(BaseChatModel):
    """A causal language model with its tokenizer and chat template, run in this process.

    ```python
    policy = LocalChatModel.from_path("Qwen/Qwen2.5-0.5B-Instruct")
    ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model: Any = Field(repr=False, exclude=True)
    """`transformers.PreTrainedModel`; the object a learner trains: its new weights answer the next call."""
    tokenizer: Any = Field(repr=False, exclude=True)
    """Its tokenizer, with a chat template."""
    name_or_path: str = ""
    temperature: float = Field(default=1.0, ge=0)
    """0 takes the most likely token; recorded log-probabilities are those of the distribution sampled from (at 0: of 1)."""
    max_new_tokens: int = Field(default=64, gt=0)
    max_batch_size: int = Field(default=128, gt=0)
    """The most calls that share one forward pass."""
    _engine: Engine = PrivateAttr()

    @classmethod
    def from_path(cls, path: str | Path, *, device: str = "cpu", dtype: str = "auto", **kwargs: Any) -> "LocalChatModel":
        """Load a model folder (or hub name) with its tokenizer. Raises `ConfigurationError` if it is not one."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"no model with a tokenizer could be loaded from {str(path)!r}: {error}") from error
        return cls(model=model, tokenizer=tokenizer, name_or_path=str(path), **kwargs)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        # not in model_post_init, where pydantic makes a ValidationError of it
        if not self.tokenizer.chat_template:
            raise ConfigurationError(
                f"the tokenizer of {self.name_or_path or 'this model'} has no chat template; set tokenizer.chat_template"
            )
        self._engine = Engine(self.model, self.tokenizer, max_batch_size=self.max_batch_size)

    @property
    def _llm_type(self) -> str:
        return "dreamgym-local"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.name_or_path, "temperature": self.temperature, "max_new_tokens": self.max_new_tokens}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(**{"ls_model_name": self.name_or_path, **super()._get_ls_params(stop=stop, **kwargs)})

    @property
    def busy_seconds(self) -> float:
        """Seconds spent in forward passes so far, for measuring what the rest costs."""
        return self._engine.busy_seconds

    def with_temperature(self, temperature: float) -> "LocalChatModel":
        """The same weights, caches and batches, sampled at another temperature."""
        clone = self.model_copy(update={"temperature": temperature})
        clone._engine = self._engine
        return clone

    def weights_changed(self) -> None:
        """Drop every cached key and value; call it after the model's weights have changed."""
        self._engine.clear()

    def _request(self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, kwargs: dict[str, Any]) -> Request:
        conversation = []
        for message in messages:
            role = ROLES.get(message.type)
            if role is None:
                raise ConfigurationError(f"a {type(message).__name__} cannot be rendered; known: {', '.join(ROLES)}")
            conversation.append({"role": role, "content": message.text})
        recorder = TokenRecorder.current()
        seed = kwargs.get("seed")
        return Request(
            conversation=conversation,
            temperature=kwargs.get("temperature", self.temperature),
            max_new_tokens=kwargs.get("max_new_tokens", self.max_new_tokens),
            seed=recorder.next_seed() if seed is None and recorder is not None else seed,
            stop=tuple(stop or ()),
            owner=id(recorder) if recorder is not None else None,
        )

    def _finish(self, generated: Generated, run_manager: Any) -> ChatResult:
        recorder = TokenRecorder.current()
        if recorder is not None:
            run_id = run_manager.run_id if run_manager else None
            recorder.record(TokenCall(run_id, generated.given_ids, generated.sampled_ids, generated.logprobs))
        message = AIMessage(
            content=generated.text,
            response_metadata={"model_name": self.name_or_path, "finish_reason": generated.finish_reason},
            usage_metadata=generated.usage,
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._finish(self._engine.submit(self._request(messages, stop, kwargs)).result(), run_manager)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        future = self._engine.submit(self._request(messages, stop, kwargs))
        return self._finish(await asyncio.wrap_future(future), run_manager)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        request = self._request(messages, stop, kwargs)
        request.on_text = pieces.put
        future = self._engine.submit(request)
        future.add_done_callback(lambda _: pieces.put(None))
        while (piece := pieces.get()) is not None:
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield self._last_chunk(future.result(), run_manager)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        request = self._request(messages, stop, kwargs)

        def deliver(piece: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens, the batch goes on
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        request.on_text = deliver
        future = self._engine.submit(request)
        future.add_done_callback(lambda _: deliver(None))
        while (piece := await pieces.get()) is not None:
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield self._last_chunk(future.result(), run_manager)

    def _last_chunk(self, generated: Generated, run_manager: Any) -> ChatGenerationChunk:
        message = self._finish(generated, run_manager).generations[0].message
        assert isinstance(message, AIMessage)
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content="",
                response_metadata=message.response_metadata,
                usage_metadata=message.usage_metadata,
                chunk_position="last",
            )
        )
