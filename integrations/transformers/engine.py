"""The engine below `LocalChatModel`: micro-batching, a prefix cache of keys and values, and seeded sampling.

One thread per model takes all calls that wait, runs them as one batch and keeps, per conversation, the keys and values of
every token already read. The next call of that conversation forwards only what is new.
"""

import contextlib
import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from random import Random
from typing import Any

import torch

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.batch import PASSES, Batch, Generated, Request, Row
from dreamgym_lg.integrations.transformers.prefix_cache import PrefixCache
from dreamgym_lg.integrations.transformers.tool_format import render

IDLE_SECONDS = 0.0005
"""A batch is closed when no further call has come for this long; ten times as long while it is smaller than the batch
before, whose callers are probably on their way."""

_one_batch_at_a_time = threading.Lock()
"""Models that take turns get whole batches: while one answers, the calls to the other gather. Episodes stay in step."""


class Engine:
    """Serves one model. Thread-safe; `submit` returns at once."""

    def __init__(self, model: Any, tokenizer: Any, *, max_batch_size: int) -> None:
        self.model, self.tokenizer, self.max_batch_size = model, tokenizer, max_batch_size
        self.passes: deque[tuple[float, float]] = deque(maxlen=PASSES)
        config = model.config.get_text_config()
        self.layers = config.num_hidden_layers
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._max_tokens = getattr(config, "max_position_embeddings", 1 << 30)
        self._check_attention(config)
        ends = model.generation_config.eos_token_id
        self.ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        self.prefixes = PrefixCache()
        self._storage = torch.empty(0)
        self._seeds = itertools.count()
        self._waiting: _Waiting = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._waiting,), name="dreamgym-engine", daemon=True).start()
        weakref.finalize(self, self._waiting.put, None)  # the thread holds no engine: model and cache go with their user

    def submit(self, request: Request) -> "Future[Generated]":
        self._waiting.put((self, request))
        return request.future

    def clear(self) -> None:
        """Forget all keys and values: the weights that made them are gone."""
        with _one_batch_at_a_time:
            self.prefixes.clear()

    def _check_attention(self, config: Any) -> None:
        """A batch has gaps between its tokens, which a window would count: attention has to be full."""
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else ["full_attention"]))
        if window is not None and window >= 2 * self._max_tokens:
            kinds.discard("sliding_attention")
        if kinds - {"full_attention"}:
            raise ConfigurationError(
                f"{config.model_type} has layers of {', '.join(sorted(kinds - {'full_attention'}))}, "
                f"sliding_window={window}; answers are exact with full attention alone: choose another model"
            )

    @torch.inference_mode()
    def answer(self, requests: Sequence[Request]) -> None:
        """Answer, as one batch, every request or set its exception."""
        rows = []
        for request in requests:
            if not request.future.set_running_or_notify_cancel():
                continue  # who asked has gone
            try:
                rows.append(self._row(request))
            except Exception as error:
                request.future.set_exception(error)
        if rows:
            training = self.model.training
            self.model.eval()
            try:
                Batch(self, rows).run()
            finally:
                if training:  # else a trainer may have begun since the last answer was given
                    self.model.train()

    def _row(self, request: Request) -> Row:
        text = render(self.tokenizer, request)
        prefix = self.prefixes.find(request, text)
        new = self.tokenizer(text[len(prefix.text) if prefix else 0 :], add_special_tokens=False)["input_ids"]
        ids = [*(prefix.ids if prefix else ()), *new]
        if len(ids) + request.max_new_tokens > self._max_tokens:
            raise ConfigurationError(
                f"the conversation has {len(ids)} tokens and may grow by {request.max_new_tokens}; the model takes "
                f"{self._max_tokens}: shorten the episode, the observations or max_new_tokens"
            )
        seed = next(self._seeds) if request.seed is None else request.seed
        return Row(request, text, ids, prefix, Random(seed) if request.temperature > 0 else None)

    def forward(self, **inputs: Any) -> torch.Tensor:
        """Logits of the last position, [batch, vocabulary], float32."""
        start = time.perf_counter()
        logits = self.model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        self.passes.append((start, time.perf_counter()))
        return logits

    def storage(self, size: int) -> torch.Tensor:
        """Memory for one batch, the same every time: fresh memory of this size costs more than what is done with it."""
        kind = {"dtype": self.model.dtype, "device": self.model.device}
        if self._storage.numel() < size or kind != {"dtype": self._storage.dtype, "device": self._storage.device}:
            self._storage = torch.empty(size, **kind)
        return self._storage[:size]

    def is_end(self, token: int) -> bool:
        return token in self.ends


_Waiting = queue.SimpleQueue[tuple[Engine, Request] | None]


def _serve(waiting: _Waiting) -> None:
    """The engine's thread; None ends it. An engine that waits for work is held by nobody here."""
    expected = 0
    while (item := waiting.get()) is not None:
        engine, request = item
        requests = [request]
        with _one_batch_at_a_time:
            with contextlib.suppress(queue.Empty):
                while len(requests) < engine.max_batch_size:
                    item = waiting.get(timeout=IDLE_SECONDS * (1 if len(requests) >= expected else 10))
                    assert item is not None, "it ends no engine that is asked"
                    requests.append(item[1])
            expected = len(requests)
            try:
                engine.answer(requests)
            except BaseException as error:  # a waiting episode must hear of it, whatever it is
                for request in requests:
                    if not request.future.done():
                        request.future.set_exception(error)
        del engine, item, request, requests
