"""One batch of the engine: calls that decode together, one or more tokens a forward pass."""

import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from dreamgym_lg.integrations.transformers.decoder import BufferLayer, Decoder
from dreamgym_lg.integrations.transformers.drafts import ORDERS, Drafts
from dreamgym_lg.integrations.transformers.guide import mask
from dreamgym_lg.integrations.transformers.prefix_cache import BLOCK, Beginnings, KeyValues, Prefix, PrefixCache, with_room
from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.integrations.transformers.tool_parsing import safe_length

FIRST_GUESSED, MOST_GUESSED = 4, 16
"""Tokens of a row that the first pass guesses, and any pass, at most."""

ROOM = 128
"""Keys and values of wrong guesses that a batch has room for, in each row."""

TOKENS = 96
"""Of replies, that a pass which guesses reads at most, all rows together: a pass of few rows takes little longer with some more
tokens, one of many takes longer by as much, and ends no sooner than its slowest row lets it."""

LOGITS = 1 << 26
"""Numbers (a quarter of a GiB) of the logits of a pass that guesses, at most: with a large vocabulary it guesses less."""

BROKEN_WEIGHTS = "the model's output is NaN: its weights are broken; was the learning rate too high?"


@dataclass(slots=True)
class Row:
    """A request inside a batch."""

    request: Request
    future: Future[Generated]
    text: str
    """The conversation, rendered."""
    ids: list[int]
    prefix: Prefix | None
    random: Random | None
    """None takes the most likely token."""
    matcher: Any = None
    """Of `guide.Guides`: which tokens may come next; None: every one."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    shown: str = ""
    guessed: int = FIRST_GUESSED
    """The most tokens that the next pass guesses: twice as many as were right in the last one, as far as there is room."""

    def tail(self) -> list[int]:
        """The last tokens of conversation and reply."""
        return (self.ids[-ORDERS[0] :] + self.sampled)[-ORDERS[0] :]

    @property
    def known(self) -> int:
        return 0 if self.prefix is None else self.prefix.known


def read_ahead(decoder: Decoder, beginnings: Beginnings, row: Row, room: int) -> int:
    """Read most of a long new text before the batch does, in which all rows are as long as the longest.

    What conversations have begun with before is not read again. Args: `room`, bytes that its keys and values may take, which
    are the batch's as well for a while. Returns how many they take; 0 where nothing is read.
    """
    end = (len(row.ids) - 1) // BLOCK * BLOCK  # the batch reads one token at least
    shape = (decoder.layers, 2, decoder.heads, with_room(len(row.ids)), decoder.head_size)
    size = math.prod(shape) * decoder.compute_dtype.itemsize
    if len(row.ids) - row.known <= 2 * BLOCK or size > room:
        return 0
    buffer = torch.empty(shape, dtype=decoder.compute_dtype, device=decoder.model.device)
    known, first = row.known, row.known == 0
    if row.prefix is not None and row.prefix.cached is not None:
        buffer[..., :known, :] = row.prefix.cached.buffer[..., :known, :]
    elif first:
        known = beginnings.fill(row.ids[:end], buffer)
    if known < end:
        decoder.read(row.ids[known:end], buffer, known)
    if first:
        beginnings.keep(row.ids[:end], buffer)
    row.prefix = Prefix("", row.ids[:end], KeyValues(buffer, end), end)
    return size


def show(request: Request, shown: str, text: str, *, over: bool) -> str:
    """Stream the new text, except what may still change: half a character, the beginning of a stop string, a tool call.

    Returns what has been shown by now.
    """
    sure = len(text)
    if not over:
        starts = (n for stop in request.stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        sure = len(shown) if text.endswith("�") else sure - max(starts, default=0)
    if request.tool_names is not None:
        sure = min(sure, safe_length(text))
    if request.on_text is None or sure <= len(shown):
        return shown
    request.on_text(text[len(shown) : sure])
    return text[:sure]


class Batch:
    """Rows that decode together. Positions: [pad | known tokens | pad | new tokens | reply], pads and wrong guesses masked out.

    A pass reads what is new of each row, and the tokens that are guessed to come next; those that the model would not have
    sampled there are dropped.
    """

    def __init__(self, decoder: Decoder, prefixes: PrefixCache, drafts: Drafts, rows: list[Row]) -> None:
        self.decoder, self.prefixes, self.drafts, self.rows = decoder, prefixes, drafts, rows
        known, new = max(row.known for row in rows), max(len(row.ids) - row.known for row in rows)
        self.known, self.given, self.filled = known, known + new, known
        most = max(row.request.max_new_tokens for row in rows)
        length = self.given + most + min(ROOM, MOST_GUESSED * (most - 1))
        shape = (decoder.layers, 2, len(rows), decoder.heads, length, decoder.head_size)
        self.buffer = decoder.buffer(math.prod(shape)).view(shape)
        self.mask = torch.zeros(len(rows), length, dtype=torch.long)
        self.ids = torch.zeros(len(rows), new, dtype=torch.long)
        self.positions = torch.zeros(len(rows), new, dtype=torch.long)
        for i, row in enumerate(rows):
            chunk = len(row.ids) - row.known
            own = self.buffer[:, :, i]
            if row.prefix is not None and row.prefix.cached is not None:
                own[..., known - row.known : known, :] = row.prefix.cached.buffer[..., : row.known, :]
            # what is masked out has to be finite; all else is written before it is read
            own[..., : known - row.known, :] = 0
            own[..., known : self.given - chunk, :] = 0
            self.mask[i, known - row.known : known] = 1
            self.mask[i, self.given - chunk : self.given] = 1
            self.ids[i, new - chunk :] = torch.tensor(row.ids[row.known :])
            self.positions[i, new - chunk :] = torch.arange(row.known, len(row.ids))
        self._layers()

    def _layers(self) -> None:
        self.cache = DynamicCache()
        self.cache.layers = [BufferLayer(layer, self.filled) for layer in self.buffer]

    def run(self) -> None:
        while self.rows:
            guesses = self._guesses()
            self._sample(self._forward(guesses), guesses)
            active = [i for i, row in enumerate(self.rows) if not row.future.done()]
            if not active:
                return
            self._advance(active)

    def _guesses(self) -> list[list[int]]:
        """What each row probably goes on with: `Row.guessed` tokens, and one more that is compared only."""
        left = [0 if row.future.done() else row.request.max_new_tokens - len(row.sampled) for row in self.rows]
        # a pass takes the reply one token further at least, so that in the end there is room without guesses
        room = self.mask.shape[1] - self.filled - self.ids.shape[1] - max(left) + 1
        room = min(room, TOKENS // len(self.rows) - 1, LOGITS // (len(self.rows) * self.decoder.vocabulary) - 1)
        guesses, lengths = [], []
        for row, most in zip(self.rows, left, strict=True):
            row.guessed = max(min(row.guessed, room, most - 1), 0)
            guesses.append(self.drafts.guess(row.tail(), row.guessed + 1) if most else [])
            if most:
                lengths.append(min(row.guessed, len(guesses[-1])))
        width = sorted(lengths)[len(lengths) // 2]  # what half of the rows have: all rows pay for the longest
        for row in self.rows:
            row.guessed = min(row.guessed, width)
        return guesses

    def _forward(self, guesses: list[list[int]]) -> torch.Tensor:
        """Logits behind the last token of each row and behind its guesses, [rows, 1 + longest guess, vocabulary]."""
        read = [guess[: row.guessed] for row, guess in zip(self.rows, guesses, strict=True)]
        width, start = max(map(len, read)), self.filled + self.ids.shape[1]
        ids = torch.zeros(len(self.rows), width, dtype=torch.long)
        for i, guess in enumerate(read):
            ids[i, : len(guess)] = torch.tensor(guess, dtype=torch.long)
            self.mask[i, start : start + len(guess)] = 1
        positions = (self.positions[:, -1:] + torch.arange(1, width + 1)).clamp(max=self.decoder.max_tokens - 1)
        self.filled = start + width
        device = self.buffer.device
        logits = self.decoder.forward(
            self.cache,
            1 + width,
            input_ids=torch.cat([self.ids, ids], dim=1).to(device),
            attention_mask=self.mask[:, : self.filled].to(device),
            position_ids=torch.cat([self.positions, positions], dim=1).to(device),
        )
        return logits.cpu()

    def _sample(self, logits: torch.Tensor, guesses: list[list[int]]) -> None:
        """Sample tokens of each row while they are as guessed; mask the keys and values of the other guesses."""
        going, width = [i for i, row in enumerate(self.rows) if not row.future.done()], logits.shape[1] - 1
        for place in range(width + 1):
            self._sample_next(going, logits[going, place])
            for i in going.copy():
                row, read = self.rows[i], self.filled - width + place
                right = row.sampled[-1:] == guesses[i][place : place + 1]
                self._finish(i, row, read)
                if not right or place == row.guessed or row.future.done():
                    self.mask[i, read : self.filled] = 0
                    row.guessed = min(2 * (place + right), MOST_GUESSED)
                    going.remove(i)
            if not going:
                break

    def _sample_next(self, going: list[int], logits: torch.Tensor) -> None:
        """One token for each of these rows, drawn from softmax(logits / temperature)."""
        rows = [self.rows[i] for i in going]
        for row, own in zip(rows, logits, strict=True):
            if row.matcher is not None:
                mask(row.matcher, own)
        warmth = torch.tensor([row.request.temperature or 1.0 for row in rows])
        logprobs = torch.log_softmax(logits / warmth[:, None], dim=-1)
        tokens = self._draw(rows, logprobs)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        if any(map(math.isnan, chosen)):
            raise FloatingPointError(BROKEN_WEIGHTS)
        for row, token, logprob in zip(rows, tokens.tolist(), chosen, strict=True):
            row.sampled.append(token)
            row.logprobs.append(logprob)
            if row.matcher is not None:
                row.matcher.consume_token(token)

    def _draw(self, rows: list[Row], logprobs: torch.Tensor) -> torch.Tensor:
        """By the inverse of the distribution at the row's own random number, whatever the batch."""
        tokens = logprobs.argmax(dim=-1)
        warm = [i for i, row in enumerate(rows) if row.random is not None]
        if warm:
            numbers = torch.tensor([row.random.random() for row in rows if row.random is not None], dtype=torch.float64)
            below = logprobs[warm].double().exp().cumsum(dim=-1)
            drawn = torch.searchsorted(below, (numbers * below[:, -1])[:, None], right=True)[:, 0]
            tokens[warm] = drawn.clamp(max=logprobs.shape[1] - 1)
        return tokens

    def _finish(self, i: int, row: Row, read: int) -> None:
        """Answer the row if it is at its end; its place in the batch is given up at the next shrinking.

        Args: `read`, where the keys and values of its tokens end in the buffer; the last token has none yet.
        """
        ended, request = row.sampled[-1] in self.decoder.ends, row.request
        if not (ended or request.on_text or request.stop or len(row.sampled) >= request.max_new_tokens):
            return
        text, cut = request.reply(self.decoder.tokenizer, row.sampled)
        over = ended or cut or len(row.sampled) >= request.max_new_tokens
        row.shown = show(request, row.shown, text, over=over)
        if not over:
            return
        self.drafts.learn([*row.ids[-ORDERS[0] :], *row.sampled], len(row.ids[-ORDERS[0] :]))
        own, new = self.buffer[:, :, i], self.given - (len(row.ids) - row.known)
        end = self.decoder.tokenizer.decode(row.sampled[-1:]) if ended else ""
        self.prefixes.keep(
            request,
            row.prefix,
            reply=text,
            text=row.text + text[len(request.forced) :] + end,
            ids=row.ids + row.sampled,
            known=own[..., self.known - row.known : self.known, :],
            new=own[..., new:read, :][..., self.mask[i, new:read].bool().to(own.device), :],
        )
        reason, guided = "stop" if ended or cut else "length", row.matcher is not None
        row.future.set_result(Generated(text, row.ids, row.sampled, row.logprobs, reason, guided=guided))

    def _advance(self, active: list[int]) -> None:
        if len(active) <= len(self.rows) // 2:  # shrinking copies the cache: worth it when it halves the work
            rows = torch.tensor(active)
            self.rows = [self.rows[i] for i in active]
            self.mask = self.mask[rows]
            self.buffer = self.buffer.index_select(2, rows.to(self.buffer.device))
            self._layers()
        self.ids = torch.tensor([row.sampled[-1:] for row in self.rows])
        self.positions = torch.tensor([[len(row.ids) + len(row.sampled) - 1] for row in self.rows])
        self.mask[:, self.filled] = 1
