"""The engine below `LocalChatModel`: micro-batching, a prefix cache of keys and values, and seeded sampling.

One thread per model takes all calls that wait, runs them as one batch and keeps, per conversation, the keys and values of
every token already read. The next call of that conversation forwards only what is new.
"""

import contextlib
import itertools
import math
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from langchain_core.messages.ai import UsageMetadata
from transformers.cache_utils import DynamicCache, DynamicLayer

from dreamgym_lg.errors import ConfigurationError

IDLE_SECONDS = 0.003
"""A batch is closed when no further call has come for this long; ten times as long while it is smaller than the batch
before, whose callers are probably on their way."""

CACHED_BYTES = 1 << 29
"""Keys and values that a model keeps over all conversations; the least recently used go first and are read anew."""

EMPTIED = 10_000
"""Conversations whose tokens are remembered beyond that."""

_one_batch_at_a_time = threading.Lock()
"""Models that take turns get whole batches: while one answers, the calls to the other gather. Episodes stay in step."""


@dataclass(slots=True)
class Request:
    """One call: a conversation in, a reply out."""

    conversation: Sequence[dict[str, str]]
    """`{"role", "content"}` messages, as chat templates take them."""
    temperature: float = 1.0
    max_new_tokens: int = 64
    seed: int | None = None
    """Fixes what is sampled, independent of the batch this call happens to share."""
    stop: tuple[str, ...] = ()
    owner: int | None = None
    """Whose conversation this is: episodes that say the same may have sampled it as different tokens."""
    on_text: Callable[[str], None] | None = None
    """Called from the engine's thread with each new piece of text."""
    future: "Future[Generated]" = field(default_factory=Future)


@dataclass(slots=True, frozen=True)
class Generated:
    """The reply, with the exact tokens read and sampled."""

    text: str
    given_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """`stop` at an end token or stop string, `length` at `max_new_tokens`."""

    @property
    def usage(self) -> UsageMetadata:
        given, sampled = len(self.given_ids), len(self.sampled_ids)
        return UsageMetadata(input_tokens=given, output_tokens=sampled, total_tokens=given + sampled)


@dataclass(slots=True)
class _Store:
    """Room for keys and values, [layers, 2, heads, room, head size]: a growing conversation is written once, in place."""

    room: torch.Tensor
    filled: int


@dataclass(slots=True, frozen=True)
class _Prefix:
    """A conversation as far as it was read: its rendered text, its tokens, and the keys and values of those."""

    text: str
    ids: list[int]
    store: _Store | None = None
    """Shared with the conversations that this one went on from and into; None: forgotten."""
    known: int = 0
    """Tokens with keys and values; the last sampled one has none yet."""
    added: int = 0
    """Bytes that this conversation added to the store."""


class _Slab(DynamicLayer):
    """One layer's cache inside a buffer of fixed length: appending writes in place instead of copying everything."""

    def __init__(self, buffer: torch.Tensor, filled: int) -> None:
        super().__init__()
        self.buffer = buffer
        self.dtype, self.device, self.is_initialized = buffer.dtype, buffer.device, True
        self._show(filled)

    def _show(self, filled: int) -> None:
        self.filled = filled
        self.keys, self.values = self.buffer[0, :, :, :filled], self.buffer[1, :, :, :filled]

    def get_seq_length(self) -> int:
        return self.filled

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.filled + key_states.shape[-2]
        self.buffer[0, :, :, self.filled : end] = key_states
        self.buffer[1, :, :, self.filled : end] = value_states
        self._show(end)
        return self.keys, self.values


@dataclass(slots=True)
class _Row:
    """A request inside a batch."""

    request: Request
    text: str
    ids: list[int]
    prefix: _Prefix | None
    generator: torch.Generator | None
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    shown: str = ""

    @property
    def known(self) -> int:
        return 0 if self.prefix is None else self.prefix.known


class Engine:
    """Serves one model. Thread-safe; `submit` returns at once."""

    def __init__(self, model: Any, tokenizer: Any, *, max_batch_size: int) -> None:
        self.model, self.tokenizer, self.max_batch_size = model, tokenizer, max_batch_size
        self.busy_seconds = 0.0
        config = model.config.get_text_config()
        self._layers = config.num_hidden_layers
        self._heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._max_tokens = getattr(config, "max_position_embeddings", 1 << 30)
        self._check_attention(config)
        ends = model.generation_config.eos_token_id
        self._ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        self._prefixes: OrderedDict[Any, _Prefix] = OrderedDict()
        self._cached = 0
        self._emptied: OrderedDict[Any, _Prefix] = OrderedDict()
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
            for key in list(self._prefixes):
                self._empty(key)

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
                _Batch(self, rows).run()
            finally:
                if training:  # else a trainer may have begun since the last answer was given
                    self.model.train()

    def _row(self, request: Request) -> _Row:
        conversation = list(request.conversation)
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        key = _key(request.owner, conversation)
        prefix = self._prefixes.get(key) or self._emptied.get(key)
        if prefix is not None and not text.startswith(prefix.text):
            prefix = None
        new = self.tokenizer(text[len(prefix.text) if prefix else 0 :], add_special_tokens=False)["input_ids"]
        ids = [*(prefix.ids if prefix else ()), *new]
        if len(ids) + request.max_new_tokens > self._max_tokens:
            raise ConfigurationError(
                f"the conversation has {len(ids)} tokens and may grow by {request.max_new_tokens}; the model takes "
                f"{self._max_tokens}: shorten the episode, the observations or max_new_tokens"
            )
        generator = None
        if request.temperature > 0:
            generator = torch.Generator()
            generator.manual_seed(next(self._seeds) if request.seed is None else request.seed)
        return _Row(request, text, ids, prefix, generator)

    def forward(self, **inputs: Any) -> torch.Tensor:
        """Logits of the last position, [batch, vocabulary], float32."""
        start = time.perf_counter()
        logits = self.model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        self.busy_seconds += time.perf_counter() - start
        return logits

    def storage(self, size: int) -> torch.Tensor:
        """Memory for one batch, the same every time: fresh memory of this size costs more than what is done with it."""
        kind = {"dtype": self.model.dtype, "device": self.model.device}
        if self._storage.numel() < size or kind != {"dtype": self._storage.dtype, "device": self._storage.device}:
            self._storage = torch.empty(size, **kind)
        return self._storage[:size]

    def keep(self, row: _Row, text: str, known: torch.Tensor, new: torch.Tensor) -> None:
        """Remember a finished conversation and its keys and values; forget the oldest beyond the budget."""
        reply = {"role": "assistant", "content": text}
        # the text is what a template makes of the reply; special tokens sampled inside it stay in the ids alone
        raw = row.text + text
        if self.is_end(row.sampled[-1]):
            raw += self.tokenizer.decode(row.sampled[-1:])
        key = _key(row.request.owner, [*row.request.conversation, reply])
        self._forget(key)
        if row.request.owner is not None:  # it goes on from here; what has no owner may be continued in several ways
            self._forget(_key(row.request.owner, row.request.conversation))
        start, end = known.shape[-2], known.shape[-2] + new.shape[-2]
        store = row.prefix.store if row.prefix is not None else None
        added = new.nbytes
        if store is None or store.filled != start or store.room.shape[-2] < end:  # or another has gone on from there
            store = _Store(new.new_empty(*new.shape[:3], 2 * end, new.shape[-1]), end)
            store.room[..., :start, :] = known
            added += known.nbytes
        store.room[..., start:end, :] = new
        store.filled = end
        self._prefixes[key] = _Prefix(raw, row.ids + row.sampled, store, end, added)
        self._cached += added
        while self._cached > CACHED_BYTES:
            self._empty(next(iter(self._prefixes)))

    def _forget(self, key: Any) -> None:
        self._emptied.pop(key, None)
        if (prefix := self._prefixes.pop(key, None)) is not None:
            self._cached -= prefix.added

    def _empty(self, key: Any) -> None:
        """Keep the tokens without keys and values: to encode the text again could give others, and split the segment."""
        prefix = self._prefixes[key]
        self._forget(key)
        self._emptied[key] = _Prefix(prefix.text, prefix.ids)
        if len(self._emptied) > EMPTIED:
            self._emptied.popitem(last=False)

    def is_end(self, token: int) -> bool:
        return token in self._ends


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


def _key(owner: int | None, conversation: Sequence[dict[str, str]]) -> Any:
    """Names a conversation up to its last reply, which is as far as it has been read before."""
    end = max((i + 1 for i, message in enumerate(conversation) if message["role"] == "assistant"), default=0)
    return owner, *((message["role"], message["content"]) for message in conversation[:end])


def _show(row: _Row, text: str, *, over: bool) -> None:
    """Stream the new text, except what may still change: half a character, or the beginning of a stop string."""
    request, sure = row.request, len(text)
    if not over:
        starts = (n for stop in request.stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        sure = len(row.shown) if text.endswith("�") else sure - max(starts, default=0)
    if request.on_text and sure > len(row.shown):
        request.on_text(text[len(row.shown) : sure])
        row.shown = text[:sure]


class _Batch:
    """Rows that decode together. Positions: [pad | known tokens | pad | new tokens | sampled tokens], pads masked out."""

    def __init__(self, engine: Engine, rows: list[_Row]) -> None:
        self.engine, self.rows = engine, rows
        known, new = max(row.known for row in rows), max(len(row.ids) - row.known for row in rows)
        self.known, self.given = known, known + new
        self.filled = self.given
        length = self.filled + max(row.request.max_new_tokens for row in rows)
        shape = (engine._layers, 2, len(rows), engine._heads, length, engine._head_size)
        self.buffer = engine.storage(math.prod(shape)).view(shape)
        self.mask = torch.zeros(len(rows), length, dtype=torch.long)
        self.ids = torch.zeros(len(rows), new, dtype=torch.long)
        self.positions = torch.zeros(len(rows), new, dtype=torch.long)
        for i, row in enumerate(rows):
            chunk = len(row.ids) - row.known
            own = self.buffer[:, :, i]
            if row.prefix is not None and row.prefix.store is not None:
                own[..., known - row.known : known, :] = row.prefix.store.room[..., : row.known, :]
            # what is masked out has to be finite; all else is written before it is read
            own[..., : known - row.known, :] = 0
            own[..., known : self.given - chunk, :] = 0
            self.mask[i, known - row.known : known] = 1
            self.mask[i, self.filled - chunk : self.filled] = 1
            self.ids[i, new - chunk :] = torch.tensor(row.ids[row.known :])
            self.positions[i, new - chunk :] = torch.arange(row.known, len(row.ids))
        self._layers(known)

    def _layers(self, filled: int) -> None:
        self.cache = DynamicCache()
        self.cache.layers = [_Slab(layer, filled) for layer in self.buffer]

    def run(self) -> None:
        while self.rows:
            device = self.buffer.device
            logits = self.engine.forward(
                input_ids=self.ids.to(device),
                attention_mask=self.mask[:, : self.filled].to(device),
                position_ids=self.positions.to(device),
                past_key_values=self.cache,
            )
            tokens = self._sample(logits.cpu())
            active = [i for i, row in enumerate(self.rows) if not self._finished(i, row)]
            if not active:
                return
            self._advance(tokens, active)

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        """One token per row; the exponential race draws from softmax(logits / temperature) with the row's own noise."""
        warmth = torch.tensor([row.request.temperature or 1.0 for row in self.rows])
        logprobs = torch.log_softmax(logits / warmth[:, None], dim=-1)
        race = logprobs.clone()
        for i, row in enumerate(self.rows):
            if row.generator is not None:
                race[i] -= torch.empty(race.shape[1]).exponential_(generator=row.generator).log()
        tokens = race.argmax(dim=-1)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        for row, token, logprob in zip(self.rows, tokens.tolist(), chosen, strict=True):
            if not row.request.future.done():
                row.sampled.append(token)
                row.logprobs.append(logprob)
        return tokens

    def _finished(self, i: int, row: _Row) -> bool:
        """Answer the row if it is at its end; its place in the batch is given up at the next shrinking."""
        if row.request.future.done():
            return True
        ended = self.engine.is_end(row.sampled[-1])
        request = row.request
        text = ""
        if ended or request.on_text or request.stop or len(row.sampled) >= request.max_new_tokens:
            text = self.engine.tokenizer.decode(row.sampled, skip_special_tokens=True)
        cut = min((at for stop in request.stop if (at := text.find(stop)) >= 0), default=-1)
        if cut >= 0:
            text = text[:cut]
        over = ended or cut >= 0 or len(row.sampled) >= request.max_new_tokens
        _show(row, text, over=over)
        if not over:
            return False
        own, new = self.buffer[:, :, i], self.given - (len(row.ids) - row.known)
        self.engine.keep(row, text, own[..., self.known - row.known : self.known, :], own[..., new : self.filled, :])
        reason = "stop" if ended or cut >= 0 else "length"
        request.future.set_result(Generated(text, row.ids, row.sampled, row.logprobs, reason))
        return True

    def _advance(self, tokens: torch.Tensor, active: list[int]) -> None:
        lengths = [len(row.ids) + len(row.sampled) - 1 for row in self.rows]
        if len(active) <= len(self.rows) // 2:  # shrinking copies the cache: worth it when it halves the work
            rows = torch.tensor(active)
            self.rows = [self.rows[i] for i in active]
            lengths = [lengths[i] for i in active]
            self.mask, tokens = self.mask[rows], tokens[rows]
            self.buffer = self.buffer.index_select(2, rows.to(self.buffer.device))
            self._layers(self.filled)
        self.ids, self.positions = tokens[:, None], torch.tensor(lengths)[:, None]
        self.mask[:, self.filled] = 1
        self.filled += 1
