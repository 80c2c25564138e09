"""One batch of the engine: calls that decode together, token by token, with keys and values in one buffer."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from langchain_core.messages.ai import UsageMetadata
from transformers.cache_utils import DynamicCache, DynamicLayer

from dreamgym_lg.integrations.transformers.tool_parsing import safe_length

if TYPE_CHECKING:
    from dreamgym_lg.integrations.transformers.engine import Engine
    from dreamgym_lg.integrations.transformers.prefix_cache import Prefix

PASSES = 10_000
"""Forward passes of an engine whose times are remembered."""


@dataclass(slots=True)
class Request:
    """One call: a conversation in, a reply out."""

    conversation: Sequence[dict[str, Any]]
    """`{"role", "content"}` messages, as chat templates take them; with tools also `tool_calls`, `tool_call_id`, `name`."""
    temperature: float = 1.0
    max_new_tokens: int = 64
    seed: int | None = None
    """Fixes what is sampled, independent of the batch this call happens to share."""
    stop: tuple[str, ...] = ()
    owner: int | None = None
    """Whose conversation this is: episodes that say the same may have sampled it as different tokens."""
    tools: list[dict[str, Any]] | None = None
    """For the chat template, in OpenAI's format."""
    names: frozenset[str] | None = None
    """The tools that may be called; None: the reply is text, whatever it looks like."""
    wants_json: bool = False
    splices: Mapping[str, str] = field(default_factory=dict)
    """Rendered text to replace by what was sampled there."""
    forced: str = ""
    """The beginning of the reply, given and not sampled."""
    hidden: frozenset[int] | None = None
    """Special tokens to leave out of the text; None: all."""
    on_text: Callable[[str], None] | None = None
    """Called from the engine's thread with each new piece of text."""
    future: "Future[Generated]" = field(default_factory=Future)


@dataclass(slots=True, frozen=True)
class Generated:
    """The reply, with the exact tokens read and sampled."""

    text: str
    """The whole reply, what was forced included."""
    given_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """`stop` at an end token or stop string, `length` at `max_new_tokens`."""

    @property
    def usage(self) -> UsageMetadata:
        given, sampled = len(self.given_ids), len(self.sampled_ids)
        return UsageMetadata(input_tokens=given, output_tokens=sampled, total_tokens=given + sampled)


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
class Row:
    """A request inside a batch."""

    request: Request
    text: str
    ids: list[int]
    prefix: "Prefix | None"
    random: Random | None
    """None takes the most likely token."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    shown: str = ""

    @property
    def known(self) -> int:
        return 0 if self.prefix is None else self.prefix.known


def _show(row: Row, text: str, *, over: bool) -> None:
    """Stream the new text, except what may still change: half a character, the beginning of a stop string, a tool call."""
    request, sure = row.request, len(text)
    if not over:
        starts = (n for stop in request.stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        sure = len(row.shown) if text.endswith("�") else sure - max(starts, default=0)
    if request.names is not None:
        sure = min(sure, safe_length(text))
    if request.on_text and sure > len(row.shown):
        request.on_text(text[len(row.shown) : sure])
        row.shown = text[:sure]


class Batch:
    """Rows that decode together. Positions: [pad | known tokens | pad | new tokens | sampled tokens], pads masked out."""

    def __init__(self, engine: "Engine", rows: list[Row]) -> None:
        self.engine, self.rows = engine, rows
        known, new = max(row.known for row in rows), max(len(row.ids) - row.known for row in rows)
        self.known, self.given = known, known + new
        self.filled = self.given
        length = self.filled + max(row.request.max_new_tokens for row in rows)
        shape = (engine.layers, 2, len(rows), engine.heads, length, engine.head_size)
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
        """One token per row, drawn from softmax(logits / temperature)."""
        warmth = torch.tensor([row.request.temperature or 1.0 for row in self.rows])
        logprobs = torch.log_softmax(logits / warmth[:, None], dim=-1)
        tokens = self._draw(logprobs)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        if any(map(math.isnan, chosen)):
            raise FloatingPointError("the model's output is NaN: its weights are broken; was the learning rate too high?")
        for row, token, logprob in zip(self.rows, tokens.tolist(), chosen, strict=True):
            if not row.request.future.done():
                row.sampled.append(token)
                row.logprobs.append(logprob)
        return tokens

    def _draw(self, logprobs: torch.Tensor) -> torch.Tensor:
        """By the inverse of the distribution at the row's own random number, whatever the batch."""
        tokens = logprobs.argmax(dim=-1)
        warm = [i for i, row in enumerate(self.rows) if row.random is not None]
        if warm:
            numbers = torch.tensor([row.random.random() for row in self.rows if row.random is not None], dtype=torch.float64)
            below = logprobs[warm].double().exp().cumsum(dim=-1)
            drawn = torch.searchsorted(below, (numbers * below[:, -1])[:, None], right=True)[:, 0]
            tokens[warm] = drawn.clamp(max=logprobs.shape[1] - 1)
        return tokens

    def _text(self, row: Row) -> str:
        hidden, decode = row.request.hidden, self.engine.tokenizer.decode
        if hidden is None:
            return row.request.forced + decode(row.sampled, skip_special_tokens=True)
        return row.request.forced + decode([token for token in row.sampled if token not in hidden])

    def _finished(self, i: int, row: Row) -> bool:
        """Answer the row if it is at its end; its place in the batch is given up at the next shrinking."""
        if row.request.future.done():
            return True
        ended, request = self.engine.is_end(row.sampled[-1]), row.request
        if not (ended or request.on_text or request.stop or len(row.sampled) >= request.max_new_tokens):
            return False
        text = self._text(row)
        cut = min((at for stop in request.stop if (at := text.find(stop, len(request.forced))) >= 0), default=-1)
        if cut >= 0:
            text = text[:cut]
        over = ended or cut >= 0 or len(row.sampled) >= request.max_new_tokens
        _show(row, text, over=over)
        if not over:
            return False
        own, new = self.buffer[:, :, i], self.given - (len(row.ids) - row.known)
        end = self.engine.tokenizer.decode(row.sampled[-1:]) if ended else ""
        known = own[..., self.known - row.known : self.known, :]
        self.engine.prefixes.keep(row, text, end, known, own[..., new : self.filled, :])
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
