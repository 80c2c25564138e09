"""`ContinuousEngine`: generates a model's replies in this process by transformers' continuous batching, for a GPU.

A call joins the running batch at the next token and leaves it at its end; a batch of `LocalEngine` waits for its longest reply.
"""

import asyncio
import atexit
import copy
import itertools
import math
import weakref
from concurrent.futures import Future
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from dreamgym_lg.errors import ConfigurationError, ContextExceeded
from dreamgym_lg.event_loop import lasting_loop
from dreamgym_lg.integrations.transformers.batch import BROKEN_WEIGHTS, end_tokens, show
from dreamgym_lg.integrations.transformers.prefix_cache import PrefixCache
from dreamgym_lg.integrations.transformers.requests import Generated, Request

MEMORY_SHARE = 0.4
"""Of the GPU's free memory, for keys and values: the policy and an experience model may share a GPU."""

PAGE = 256
"""Tokens of a page of keys and values; flash attention asks for so many."""

WATCH_SECONDS = 5.0
"""A call that hears nothing for so long looks whether its batch still runs."""


class ContinuousEngine:
    """Generates the replies of a model in this process, by transformers' continuous batching. Thread-safe.

    A seed fixes no reply: all calls draw from PyTorch's generator. Tool calls are not guided. `clear` waits for the calls under
    way, then gives back all that the batch held; the next call starts one with the model's present weights. Nothing else may
    compute with the model between a call and `clear`. Calls at temperature 0 and others take turns, which takes a second each.

    Float32 weights on a GPU, which a policy in training has, are copied to bfloat16 when a batch starts.

    Args:
        model: A `transformers.PreTrainedModel`, or a PEFT model of one.
        max_batch_size: The most calls that share one forward pass.
        cached_tokens: Tokens whose keys and values there is room for; None: as fill 40 % of the GPU's free memory.

    Raises `ConfigurationError` for a `max_batch_size` or `cached_tokens` below 1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_batch_size: int = 128,
        cached_tokens: int | None = None,
    ) -> None:
        for name, given in (("max_batch_size", max_batch_size), ("cached_tokens", cached_tokens)):
            if given is not None and given < 1:
                raise ConfigurationError(f"{name}={given}: at least 1")
        self.ends = end_tokens(tokenizer, model)
        self._tokenizer = tokenizer
        self._max_tokens = getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30)
        self._prefixes = PrefixCache()
        self._names = map(str, itertools.count())
        self._batches = _Batches(model, max_batch_size, cached_tokens)
        self._loop = lasting_loop("dreamgym-continuous")
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._batches.abandon).atexit = False

    def submit(self, request: Request) -> "Future[Generated]":
        """Ask for a reply; returns at once."""
        return asyncio.run_coroutine_threadsafe(self._reply(request), self._loop)

    def clear(self) -> None:
        """Forget every key and value, and give their memory back: the weights that made them have changed."""
        asyncio.run_coroutine_threadsafe(self._batches.stop(), self._loop).result()

    # --- in the loop's thread -----------------------------------------------------------------------------------------------

    async def _reply(self, request: Request) -> Generated:
        text, ids, _ = self._prefixes.encode(self._tokenizer, request, self._max_tokens)
        output = await self._sample(request, ids)
        sampled, logprobs = output.generated_tokens, output.logprobs
        if any(map(math.isnan, logprobs)):
            raise FloatingPointError(BROKEN_WEIGHTS)
        ended = sampled[-1] in self.ends
        reply, cut = self._prefixes.keep_reply(self._tokenizer, request, text=text, ids=ids, sampled=sampled, ended=ended)
        return Generated(reply, ids, sampled, logprobs, "stop" if ended or cut else "length")

    async def _sample(self, request: Request, ids: list[int]) -> Any:
        """The batch's last word on the request. Text is read token by token where it is streamed or may end the reply."""
        options = {"temperature": float(request.temperature)} if request.temperature > 0 else {}
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        name, shown, over = next(self._names), "", False
        async with self._batches.lock:
            batch = await self._batches.running(greedy=not options)
            _check_room(request, ids, batch)
            batch.register_result_handler(name, outputs.put_nowait)
            batch.add_request(
                ids,
                name,
                max_new_tokens=request.max_new_tokens,
                streaming=bool(request.stop or request.on_text),
                eos_token_id=sorted(self.ends),
                **options,
            )
        try:
            while not over:
                output = await _next(outputs, batch)
                text, cut = request.reply(self._tokenizer, output.generated_tokens)
                over = cut or output.is_finished()
                shown = show(request, shown, text, over=over)
        finally:
            if batch.output_router.result_handlers.pop(name, None) is not None:  # else the batch itself has ended it
                batch.cancel_request(name)
        return output


_all_batches: "weakref.WeakSet[_Batches]" = weakref.WeakSet()


class _Batches:
    """A model's batch that runs: one that samples, or one that takes the most likely token. In the loop's thread alone.

    Never both: transformers changes the model's configuration during each pass of a batch, so that no other thread may compute
    with the same model meanwhile (`is_causal`; it would read what comes after a token).
    """

    def __init__(self, model: PreTrainedModel, max_batch_size: int, cached_tokens: int | None) -> None:
        self.lock = asyncio.Lock()
        self._model, self._was_training = model, model.training
        self._sampler: PreTrainedModel | None = None
        self._running: ContinuousBatchingManager | None = None
        self._greedy = False
        self._config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=None if cached_tokens is None else math.ceil(cached_tokens / PAGE),
            max_memory_percent=MEMORY_SHARE,
            max_requests_per_batch=max_batch_size,
            return_logprobs=True,
            per_request_processors=True,
        )
        _all_batches.add(self)

    async def running(self, *, greedy: bool) -> ContinuousBatchingManager:
        """The batch, started if it has to be."""
        if self._running is not None and self._running.is_running() and self._greedy == greedy:
            return self._running
        await self._end()  # of the other kind, or dead of an error
        if self._sampler is None:
            self._was_training = self._model.training
            self._sampler = sampling_model(self._model)
        # a processor for temperatures is made only for one that is not 1; each call brings its own
        sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 0.5}
        generation = GenerationConfig(eos_token_id=-1, **sampling)
        # the batch seeds PyTorch's generator, which other code draws from too: by a number drawn from it
        self._config.seed = int(torch.randint(1 << 31, ()))
        batch = self._sampler.init_continuous_batching(generation, self._config)
        self._running, self._greedy = batch, greedy
        batch.start()  # a daemon thread, as this one is: it holds up no process that ends
        while batch.batch_processor is None and batch.is_running():
            await asyncio.sleep(0.001)
        if not batch.is_running():
            raise _failure(batch.background_thread_status.fatal_error)
        return batch

    async def stop(self) -> None:
        """Let the calls under way end, and give all memory back."""
        async with self.lock:
            await self._end()
            if self._sampler is not None:
                self._sampler = None
                self._model.train(self._was_training)

    async def _end(self) -> None:
        if self._running is not None:
            await asyncio.to_thread(self._running.stop)
            self._running = None

    def abandon(self) -> None:
        """Nobody waits for a reply any more."""
        if self._running is not None:
            self._running.stop(hard_stop=True, timeout=WATCH_SECONDS)


@atexit.register
def _abandon_all() -> None:
    """A process whose threads compute while it ends is aborted."""
    for batches in list(_all_batches):
        batches.abandon()


def sampling_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself; of float32 weights on a GPU, a copy in bfloat16, which is what flash attention takes."""
    if model.device.type != "cuda" or model.dtype != torch.float32:
        return model
    return bfloat16_copy(model)


def bfloat16_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose weights are never there twice in float32; tied ones stay tied."""
    weights = {id(each): torch.nn.Parameter(each.detach().bfloat16(), requires_grad=False) for each in model.parameters()}
    return copy.deepcopy(model, weights)


def _check_room(request: Request, ids: list[int], batch: ContinuousBatchingManager) -> None:
    """Raise `ContextExceeded` for a conversation that alone is more than all pages hold: it would end the whole batch."""
    room = batch.continuous_batching_config.num_blocks * PAGE
    if len(ids) + request.max_new_tokens > room:
        raise ContextExceeded(
            f"the conversation has {len(ids)} tokens and may grow by {request.max_new_tokens}; there is memory for the keys "
            f"and values of {room}: shorten the episode, the observations or max_new_tokens"
        )


async def _next(outputs: "asyncio.Queue[Any]", batch: ContinuousBatchingManager) -> Any:
    """What the batch says next of a call. Raises if the call, or the whole batch, has failed."""
    while True:
        try:
            output = await asyncio.wait_for(outputs.get(), WATCH_SECONDS)
        except TimeoutError:
            if batch.is_running():
                continue
            raise _failure(batch.background_thread_status.fatal_error) from None
        if output.error is not None:
            raise _failure(output.error)
        return output


def _failure(error: Any) -> Exception:
    if "nan" in str(error):  # no distribution to draw from
        return FloatingPointError(BROKEN_WEIGHTS)
    return RuntimeError(f"transformers' continuous batching has failed: {error}")
