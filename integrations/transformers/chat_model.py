"""`LocalChatModel`: any Hugging Face causal language model as a LangChain chat model, made for many episodes at once.

Concurrent calls become one batch, a growing conversation keeps its key-value cache (`integrations/transformers_engine.py`
does both), and every sampled token reaches the episode's `TokenRecorder` as it was sampled.
"""

import asyncio
import contextlib
import json
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as error:
    raise MissingDependency.extra("transformers", "train") from error

from dreamgym_lg.integrations.transformers.batch import Generated, Request
from dreamgym_lg.integrations.transformers.engine import Engine
from dreamgym_lg.integrations.transformers.engine_process import EngineProcess
from dreamgym_lg.integrations.transformers.structured_output import json_parser, to_response_format, with_raw
from dreamgym_lg.integrations.transformers.tool_format import ToolDialect, has_calls, to_entry


class LocalChatModel(BaseChatModel):
    """A causal language model with its tokenizer and chat template, run in this process or one of its own.

    ```python
    policy = LocalChatModel.from_path("Qwen/Qwen2.5-0.5B-Instruct")
    ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model: Any = Field(repr=False, exclude=True)
    """`transformers.PreTrainedModel`; the object a learner trains: its new weights answer the next call. None where it
    has a process of its own."""
    tokenizer: Any = Field(repr=False, exclude=True)
    """Its tokenizer, with a chat template."""
    name_or_path: str = ""
    temperature: float = Field(default=1.0, ge=0)
    """0 takes the most likely token; recorded log-probabilities are those of the distribution sampled from (at 0: of 1)."""
    max_new_tokens: int = Field(default=64, gt=0)
    max_batch_size: int = Field(default=128, gt=0)
    """The most calls that share one forward pass."""
    _engine: Engine | EngineProcess = PrivateAttr()
    _tools: ToolDialect = PrivateAttr()

    @classmethod
    def from_path(
        cls, path: str | Path, *, device: str = "cpu", dtype: str = "auto", own_process: bool = False, **fields: Any
    ) -> "LocalChatModel":
        """Load a model folder (or hub name) with its tokenizer.

        Args:
            own_process: Load it in a process of its own, where it computes at the same time as a model of this process: an
                experience model beside the policy. It takes some seconds to start, and cannot be trained: `model` is None.

        Raises `ConfigurationError` if the path is no model.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = None if own_process else AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"no model with a tokenizer could be loaded from {str(path)!r}: {error}") from error
        size = {"max_batch_size": fields["max_batch_size"]} if "max_batch_size" in fields else {}
        engine = EngineProcess(str(path), device=device, dtype=dtype, **size) if own_process else None
        return cls(engine=engine, model=model, tokenizer=tokenizer, name_or_path=str(path), **fields)

    def __init__(self, *, engine: EngineProcess | None = None, **fields: Any) -> None:
        super().__init__(**fields)
        # not in model_post_init, where pydantic makes a ValidationError of it
        if not self.tokenizer.chat_template:
            raise ConfigurationError(
                f"the tokenizer of {self.name_or_path or 'this model'} has no chat template; set tokenizer.chat_template"
            )
        self._engine = engine or Engine(self.model, self.tokenizer, max_batch_size=self.max_batch_size)
        self._tools = ToolDialect(self.tokenizer, self._engine.ends)

    @property
    def _llm_type(self) -> str:
        return "dreamgym-local"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.name_or_path, "temperature": self.temperature, "max_new_tokens": self.max_new_tokens}

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        # as in the base class, whose detour by a deprecated method is a tenth of what LangChain and LangGraph cost an episode
        return {"_type": self._llm_type, **self._identifying_params, "stop": stop, **kwargs}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(**{"ls_model_name": self.name_or_path, **super()._get_ls_params(stop=stop, **kwargs)})

    @property
    def passes(self) -> list[tuple[float, float]]:
        """When each of the last 10,000 forward passes began and ended, by `time.perf_counter`."""
        return list(self._engine.passes)

    def with_temperature(self, temperature: float) -> "LocalChatModel":
        """The same weights, caches and batches, sampled at another temperature."""
        clone = self.model_copy(update={"temperature": temperature})
        clone._engine, clone._tools = self._engine, self._tools
        return clone

    def weights_changed(self) -> None:
        """Drop every cached key and value; call it after the model's weights have changed."""
        self._engine.clear()

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools.

        `tool_choice`: `auto` or None, the model decides; `none`, it reads of the tools, but its reply is text; `any` or
        `required`, a call of some tool; a tool's name or `{"type": "function", "function": {"name": ...}}`, a call of that
        one. What is not the model's choice is given to it as the beginning of its reply: no training rewards it for that.
        """
        converted = [convert_to_openai_tool(tool) for tool in tools]
        return self.bind(tools=converted, **({} if tool_choice is None else {"tool_choice": tool_choice}), **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "function_calling",
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers of this form: `function_calling` by a forced tool call, `json_schema` and `json_mode` as JSON text.

        Nothing but the first characters is forced: an answer that does not fit raises when it is parsed.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        traced = {"kwargs": {"method": method}, "schema": schema}
        model = self.bind(response_format=to_response_format(schema, method), ls_structured_output_format=traced)
        parser = json_parser(schema)
        return with_raw(model, parser) if include_raw else model | parser

    def _request(self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, kwargs: dict[str, Any]) -> Request:
        recorder = TokenRecorder.current()
        seed = kwargs.get("seed")
        tools, choice, form = kwargs.get("tools") or (), kwargs.get("tool_choice"), kwargs.get("response_format")
        plain = not tools and choice is None and form is None and not any(map(has_calls, messages))
        request = Request(
            conversation=[to_entry(message) for message in messages] if plain else (),
            temperature=kwargs.get("temperature", self.temperature),
            max_new_tokens=kwargs.get("max_new_tokens", self.max_new_tokens),
            seed=recorder.next_seed() if seed is None and recorder is not None else seed,
            stop=tuple(stop or ()),
            owner=id(recorder) if recorder is not None else None,
        )
        if not plain:
            self._tools.prepare(request, messages, tools=tools, choice=choice, response_format=form)
        return request

    def _finish(self, request: Request, generated: Generated, run_manager: Any) -> AIMessage:
        recorder = TokenRecorder.current()
        if recorder is not None:
            run_id = run_manager.run_id if run_manager else None
            tokens = generated.given_ids, generated.sampled_ids, generated.logprobs
            recorder.record(TokenCall(run_id, *tokens, temperature=request.temperature))
        return AIMessage(
            **self._tools.read(request, generated),
            response_metadata={"model_name": self.name_or_path, "finish_reason": generated.finish_reason},
            usage_metadata=generated.usage,
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, kwargs)
        return _result(self._finish(request, self._engine.submit(request).result(), run_manager))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, kwargs)
        return _result(self._finish(request, await asyncio.wrap_future(self._engine.submit(request)), run_manager))

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
        streamed = 0
        while (piece := pieces.get()) is not None:
            streamed += len(piece)
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield _last_chunk(self._finish(request, future.result(), run_manager), streamed)

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
        streamed = 0
        while (piece := await pieces.get()) is not None:
            streamed += len(piece)
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield _last_chunk(self._finish(request, future.result(), run_manager), streamed)


def _result(message: AIMessage) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message)])


def _last_chunk(message: AIMessage, streamed: int) -> ChatGenerationChunk:
    """What has not been streamed: text that might have become a tool call, the calls, and what is known only now."""
    chunks = [
        tool_call_chunk(name=call["name"], args=json.dumps(call["args"], ensure_ascii=False), id=call["id"], index=i)
        for i, call in enumerate(message.tool_calls)
    ]
    chunks += [
        tool_call_chunk(name=call["name"], args=call["args"], id=call["id"], index=i)
        for i, call in enumerate(message.invalid_tool_calls, len(chunks))
    ]
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content=message.text[streamed:],
            tool_call_chunks=chunks,
            additional_kwargs=message.additional_kwargs,
            response_metadata=message.response_metadata,
            usage_metadata=message.usage_metadata,
            chunk_position="last",
        )
    )
