"""`LocalChatModel`: a Hugging Face causal language model as a LangChain chat model.

It is made for many episodes at once: concurrent calls become one batch, a growing conversation keeps its key-value cache
(`engine.py` does both), and every sampled token reaches the episode's `TokenRecorder`.
"""

import asyncio
import contextlib
import json
import queue
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.adapter_files import save_model
from dreamgym_lg.integrations.transformers.engine import LocalEngine
from dreamgym_lg.integrations.transformers.loading import HUB_OPTIONS, MODEL_OPTIONS, load_model, load_tokenizer
from dreamgym_lg.integrations.transformers.requests import Engine, Generated, Request, ToolChoice
from dreamgym_lg.integrations.transformers.structured_output import json_parser, to_response_format, with_raw
from dreamgym_lg.integrations.transformers.tool_format import ToolDialect, has_calls, to_entry
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder, TrainablePolicy

_RunManager = CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None

_ELSEWHERE = {
    "torch_dtype": "dtype",
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "model_name": "name_or_path",
}
"""Names of arguments in other libraries. There are none that cut the distribution: log-probabilities are of the whole one."""
_RENDERING = {
    "tools": "which are given by bind_tools",
    "messages": "which is the prompt",
    "add_generation_prompt": "which is always so: the model replies",
    "chat_template": "which is the tokenizer's: set tokenizer.chat_template",
}
"""Variables of chat templates that are set already."""


class LocalChatModel(TrainablePolicy):
    """A local causal language model as a chat model that records every token it samples.

    ```python
    policy = LocalChatModel.from_path("Qwen/Qwen2.5-0.5B-Instruct")
    policy = LocalChatModel(model=model, tokenizer=tokenizer)
    ```
    Raises `ConfigurationError` for an unknown argument, without a chat template, and without both `model` and `engine`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model: torch.nn.Module | None = Field(default=None, repr=False, exclude=True)
    """`transformers.PreTrainedModel`, or a PEFT model of one. A learner trains this very object: its new weights answer the
    next call. None where servers alone have it, so that it cannot be trained from here."""
    tokenizer: PreTrainedTokenizerBase = Field(repr=False, exclude=True)
    """Its tokenizer, with a chat template."""
    engine: Engine = Field(default=cast(Engine, None), repr=False, exclude=True)
    """Generates the replies; by default a `LocalEngine` of `model`."""
    name_or_path: str = ""
    temperature: float = Field(default=1.0, ge=0)
    """0 takes the most likely token; recorded log-probabilities are those of the distribution sampled from (at 0: of 1)."""
    max_new_tokens: int = Field(default=64, gt=0)
    """The most tokens of one reply."""
    stop: list[str] = Field(default_factory=list)
    """A reply ends before the first of these; `stop` of a call takes their place."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, e.g. Qwen3's `{"enable_thinking": False}`."""
    streaming: bool = False
    """True: `invoke` passes each piece of text to callbacks as it comes, as `stream` does."""
    _tools: ToolDialect = PrivateAttr()

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        max_batch_size: int = 128,
        **options: Any,
    ) -> "LocalChatModel":
        """Load a model folder (or hub name) with its tokenizer.

        Args:
            device: `auto`: the GPU if there is one, else the CPU; or a name of PyTorch's, like `cuda:1`.
            dtype: Of the weights: `auto` as they were saved, or `bfloat16`, `float16`, `float32`. A policy to be trained needs
                `float32`: of bfloat16 weights, an update at a usual learning rate moves few. On a GPU such a model computes in
                bfloat16 all the same, by autocast.
            max_batch_size: The most calls that share one forward pass.
            options: Fields of `LocalChatModel`, and `revision`, `token`, `trust_remote_code`, `attn_implementation`,
                `device_map` (of one device) and `quantization_config` as `from_pretrained` takes them.

        Raises `ConfigurationError` if the path is no model, and for an unknown option.
        """
        loading = {name: options.pop(name) for name in sorted((HUB_OPTIONS | MODEL_OPTIONS) & options.keys())}
        known = {"device", "dtype", "max_batch_size", *HUB_OPTIONS, *MODEL_OPTIONS}
        known |= cls.model_fields.keys() - {"model", "tokenizer", "engine"}
        _check_names("option of LocalChatModel.from_path", options, known)
        tokenizer = load_tokenizer(path, **loading)
        model = load_model(path, device=device, dtype=dtype, **loading)
        engine = LocalEngine(model, tokenizer, max_batch_size=max_batch_size)
        return cls(engine=engine, model=model, tokenizer=tokenizer, **{"name_or_path": str(path), **options})

    def __init__(self, **fields: Any) -> None:
        _check_names("field of LocalChatModel", fields, type(self).model_fields)
        super().__init__(**fields)
        # not in model_post_init, where pydantic makes a ValidationError of it
        if not self.tokenizer.chat_template:
            raise ConfigurationError(
                f"the tokenizer of {self.name_or_path or 'this model'} has no chat template; set tokenizer.chat_template"
            )
        template = str(self.tokenizer.chat_template)
        for name in self.chat_template_kwargs:
            if name in _RENDERING or not re.search(rf"\b{re.escape(name)}\b", template):
                reason = _RENDERING.get(name, "which the chat template does not read: look there for what it is called")
                raise ConfigurationError(f"chat_template_kwargs has {name!r}, {reason}")
        if self.engine is None:
            if self.model is None:
                raise ConfigurationError("nothing generates the replies: give model=, engine=, or use LocalChatModel.from_path")
            self.engine = LocalEngine(self.model, self.tokenizer)
        self._tools = ToolDialect(self.tokenizer, self.engine.ends)

    @property
    def _llm_type(self) -> str:
        return "dreamgym-local"

    @property
    def model_name(self) -> str:
        """The model's name for LangChain's `create_agent`, which would read `model` instead."""
        return self.name_or_path or self._llm_type

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.name_or_path, "temperature": self.temperature, "max_new_tokens": self.max_new_tokens}

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        # as in the base class, whose detour by a deprecated method is a tenth of what LangChain and LangGraph cost an episode
        return {"_type": self._llm_type, **self._identifying_params, "stop": stop, **kwargs}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(**{"ls_model_name": self.name_or_path, **super()._get_ls_params(stop=stop, **kwargs)})

    def with_temperature(self, temperature: float) -> "LocalChatModel":
        """The same weights, caches and batches, sampled at another temperature."""
        return self.model_copy(update={"temperature": temperature})

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields that decide the replies of these weights, as JSON. Kept beside them."""
        names = "temperature", "max_new_tokens", "stop", "chat_template_kwargs"
        return {name: getattr(self, name) for name in names}

    def free_memory(self) -> None:
        if isinstance(self.engine, LocalEngine):  # any other has a process, and so a memory, of its own
            self.engine.clear()

    def weights_changed(self) -> None:
        """Drop every cached key and value."""
        self.engine.clear()

    def save(self, folder: Path) -> None:
        if self.model is None:
            raise ConfigurationError("the policy has no weights in this process, so that it cannot be trained: give model=")
        save_model(cast(PreTrainedModel, self.model), self.tokenizer, folder, self.sampling)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: ToolChoice = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools.

        Args:
            tools: Functions, LangChain tools, pydantic classes, or OpenAI's JSON.
            tool_choice: `auto`, False or None: the model decides. `none`: it reads of the tools, but its reply is text. `any`,
                `required` or True: a call of some tool. A tool's name or `{"type": "function", "function": {"name": ...}}`: a
                call of that one. What is not the model's choice is given to it as the beginning of its reply, and is not
                trained on.
        """
        converted = [convert_to_openai_tool(tool) for tool in tools]
        return self.bind(tools=converted, **({} if tool_choice is None else {"tool_choice": tool_choice}), **kwargs)

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, method: str = "function_calling", **kwargs: Any
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers that fit a schema: by a forced tool call, or as JSON text.

        Nothing but the first characters is forced: an answer that does not fit raises `OutputParserException`, and with
        `include_raw` it has `parsed` None.
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
        tools, choice = kwargs.get("tools") or (), kwargs.get("tool_choice")
        answer = kwargs.get("response_format")
        plain = self._tools.is_plain and not tools and choice is None and answer is None and not any(map(has_calls, messages))
        request = Request(
            conversation=self._tools.template.fitted([to_entry(message) for message in messages]) if plain else (),
            temperature=kwargs.get("temperature", self.temperature),
            max_new_tokens=kwargs.get("max_new_tokens", self.max_new_tokens),
            seed=recorder.next_seed() if seed is None and recorder is not None else seed,
            stop=tuple(stop or self.stop),
            owner=id(recorder) if recorder is not None else None,
            template_kwargs=self.chat_template_kwargs,
        )
        if not plain:
            self._tools.prepare(request, messages, tools=tools, choice=choice, response_format=answer)
        return request

    def _finish(self, request: Request, generated: Generated, run_manager: _RunManager) -> AIMessage:
        recorder = TokenRecorder.current()
        if recorder is not None:
            run_id = run_manager.run_id if run_manager else None
            tokens = generated.prompt_ids, generated.sampled_ids, generated.logprobs
            recorder.record(TokenCall(run_id, *tokens, request.temperature, generated.policy_version))
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
        return _result(self._finish(request, self.engine.submit(request).result(), run_manager))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, kwargs)
        return _result(self._finish(request, await asyncio.wrap_future(self.engine.submit(request)), run_manager))

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
        future = self.engine.submit(request)
        future.add_done_callback(lambda _: pieces.put(None))
        streamed = ""
        while (piece := pieces.get()) is not None:
            streamed += piece
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
        future = self.engine.submit(request)
        future.add_done_callback(lambda _: deliver(None))
        streamed = ""
        while (piece := await pieces.get()) is not None:
            streamed += piece
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield _last_chunk(self._finish(request, future.result(), run_manager), streamed)


def _check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises `ConfigurationError` for a name that would be ignored."""
    for name in names:
        if name not in known:
            if name in _ELSEWHERE:
                raise ConfigurationError(f"{name} is no {kind}: its name is {_ELSEWHERE[name]}")
            raise ConfigurationError.unknown(kind, name, known)


def _result(message: AIMessage) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message)])


def _last_chunk(message: AIMessage, streamed: str) -> ChatGenerationChunk:
    """The rest of a streamed reply: text that was held back, calls, metadata."""
    calls: list[Any] = [{**call, "args": json.dumps(call["args"], ensure_ascii=False)} for call in message.tool_calls]
    calls += message.invalid_tool_calls
    chunks = [tool_call_chunk(name=call["name"], args=call["args"], id=call["id"], index=i) for i, call in enumerate(calls)]
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content=message.text.removeprefix(streamed),
            tool_call_chunks=chunks,
            additional_kwargs=message.additional_kwargs,
            response_metadata=message.response_metadata,
            usage_metadata=message.usage_metadata,
            chunk_position="last",
        )
    )
