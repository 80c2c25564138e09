"""One batch of the engine: calls that decode together, token by token."""

import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from os.path import commonprefix
from random import Random
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.attention import can_share, shared_prompt
from dreamgym_lg.integrations.transformers.call_format import length_before, safe_length
from dreamgym_lg.integrations.transformers.chat_template import ChatTemplate
from dreamgym_lg.integrations.transformers.prefix_cache import (
    BLOCK,
    KeyValues,
    Prefix,
    PrefixCache,
    SharedPromptBlocks,
)
from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.text import OPENINGS, split_reply

BROKEN_WEIGHTS = "the model's output is NaN: its weights are broken; was the learning rate too high?"


def end_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None) -> frozenset[int]:
    """The tokens that end a reply. Those of tokenizer and chat template, and of the model's generation settings."""
    template = ChatTemplate(tokenizer).end if tokenizer.chat_template else None
    ends = model.generation_config.eos_token_id if model is not None else None
    return frozenset({tokenizer.eos_token_id, template, *(ends if isinstance(ends, list) else [ends])} - {None})


class Decoder:
    """A causal language model with its tokenizer, for batches.

    Float32 weights on a GPU, which a policy in training has, compute in bfloat16 by autocast, as TRL's trainers do.

    Raises `ConfigurationError` for a model without full attention, and for one spread over several devices.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        config = self.model.config.get_text_config()
        self.layers = config.num_hidden_layers
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.max_tokens = getattr(config, "max_position_embeddings", 1 << 30)
        _check_attention(config, self.max_tokens)
        devices = sorted({str(parameter.device) for parameter in self.model.parameters()})
        if len(devices) > 1:
            raise ConfigurationError(
                f"the model is spread over {', '.join(devices)}, and a batch keeps its keys and values on one device: load it "
                "with device='auto', or with a device_map that names one device"
            )
        self.ends = end_tokens(tokenizer, model)
        self._buffer = torch.empty(0)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations, keys and values."""
        autocast = self.model.device.type == "cuda" and self.model.dtype == torch.float32
        return torch.bfloat16 if autocast else self.model.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.heads * self.head_size * self.compute_dtype.itemsize

    def autocast(self) -> torch.autocast:
        """Autocast for a whole batch, so that the weights are cast once.

        Nothing may train meanwhile: the copies are the process's, and have no gradient.
        """
        enabled = self.compute_dtype != self.model.dtype
        return torch.autocast(self.model.device.type, dtype=self.compute_dtype if enabled else None, enabled=enabled)

    def forward(self, cache: DynamicCache, **inputs: Any) -> torch.Tensor:
        """Logits of the last position, [batch, vocabulary], float32. Args: `cache`, to which keys and values are added."""
        inputs |= {"cache": cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(**inputs).logits[:, -1].float()

    def read(self, ids: list[int], buffer: torch.Tensor, known: int) -> None:
        """Write keys and values of `ids` into the buffer, behind those of `known` tokens.

        Args: `buffer`, [layers, 2, heads, tokens or more, head size].
        """
        device, cache = self.model.device, DynamicCache()
        cache.layers = [_BufferLayer(layer[:, None], known) for layer in buffer]
        positions = torch.arange(known, known + len(ids), device=device)[None]
        self.forward(cache, input_ids=torch.tensor([ids], device=device), position_ids=positions)

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory for keys and values."""
        return torch.empty(shape, dtype=self.compute_dtype, device=self.model.device)

    def buffer(self, *shape: int) -> torch.Tensor:
        """Memory for the keys and values of one batch, which the next one overwrites."""
        # the same every time: fresh memory costs more than the copies into it
        size = math.prod(shape)
        if self._buffer.numel() < size or (self.compute_dtype, self.model.device) != (self._buffer.dtype, self._buffer.device):
            self._buffer = self.empty(size)
        return self._buffer[:size].view(shape)

    def free_buffer(self) -> None:
        """Give that memory back."""
        self._buffer = torch.empty(0)


def _check_attention(config: PreTrainedConfig, max_tokens: int) -> None:
    """Raise `ConfigurationError` where attention is not full."""
    # a batch has gaps between its tokens, which a window would count
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else ["full_attention"]))
    if window is not None and window >= 2 * max_tokens:
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        raise ConfigurationError(
            f"{config.model_type} has layers of {', '.join(sorted(kinds - {'full_attention'}))}, "
            f"sliding_window={window}; answers are exact with full attention alone: choose another model"
        )


class _BufferLayer(DynamicLayer):
    """One layer's cache inside a buffer of fixed length, to which appending writes in place."""

    def __init__(self, buffer: torch.Tensor, filled: int) -> None:
        super().__init__()
        self.buffer = buffer
        self.dtype, self.device, self.is_initialized = buffer.dtype, buffer.device, True
        self._set_filled(filled)

    def _set_filled(self, filled: int) -> None:
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
        self._set_filled(end)
        return self.keys, self.values


@dataclass(slots=True)
class Row:
    """A request inside a batch."""

    request: Request
    future: Future[Generated]
    text: str
    """The conversation, rendered."""
    ids: list[int]
    prefix: Prefix
    random: Random | None
    """None takes the most likely token."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    streamed: str = ""

    @property
    def known(self) -> int:
        return self.prefix.known


def read_ahead(decoder: Decoder, prompts: SharedPromptBlocks, row: Row, room: int) -> int:
    """Read most of a long new text alone. In the batch all rows are padded to the longest.

    Known beginnings of conversations are not read again. Args: `room`, bytes that new keys and values may take, beside those of
    the batch. Returns how many they take; 0 where nothing is read.
    """
    end = (len(row.ids) - 1) // BLOCK * BLOCK  # the batch reads one token at least
    cached = row.prefix.cached
    size = (end - row.known) * decoder.token_bytes
    if len(row.ids) - row.known <= 2 * BLOCK or size > room:
        return 0
    known, none = row.known, decoder.empty(decoder.layers, 2, decoder.heads, 0, decoder.head_size)
    if first := cached is None:
        blocks = prompts.find(row.ids[:end])
        known, cached = len(blocks) * BLOCK, KeyValues(blocks, none, len(blocks) * BLOCK)
    buffer = decoder.buffer(decoder.layers, 2, decoder.heads, end, decoder.head_size)
    cached.copy_to(buffer[..., :known, :], 0)
    if known < end:
        decoder.read(row.ids[known:end], buffer, known)
    if first:
        cached = KeyValues(prompts.keep(row.ids[:end], buffer), none, end)
    else:
        cached = cached.extended(buffer[..., known:, :], known)
    row.prefix = Prefix("", row.ids[:end], cached, end)
    return size


def stream_settled_text(row: Row, text: str) -> None:
    """Stream the new text of an unfinished reply that cannot change any more. The rest comes with its end.

    Half a character, the beginning of a stop string and a tool call may still change, as may space at the end; reasoning is
    not streamed.
    """
    request = row.request
    if request.on_text is None or request.is_read_whole or text.endswith("�"):
        return
    answer = split_reply(text, row.text, unfinished=True)[1].rstrip()
    length = length_before(answer, (*request.stop, *OPENINGS))
    settled = answer[: length if request.tool_names is None else min(length, safe_length(answer))]
    if len(settled) > len(row.streamed) and settled.startswith(row.streamed):
        request.on_text(settled[len(row.streamed) :])
        row.streamed = settled


def shared_tokens(decoder: Decoder, rows: list[Row]) -> int:
    """Number of known tokens that all rows begin with. 0 where reading them once gains nothing."""
    if len(rows) == 1 or not can_share(decoder.model):
        return 0
    number = len(commonprefix([row.ids[: row.known] for row in rows]))
    return number if number >= BLOCK else 0


class Batch:
    """Rows that decode together.

    Positions: [pad | known tokens | pad | new tokens | sampled tokens], pads masked out. Behind those of the prompt that all
    rows begin with, where its keys and values can be read once for all (`attention`).
    """

    def __init__(self, decoder: Decoder, prefixes: PrefixCache, rows: list[Row]) -> None:
        self.decoder, self.prefixes, self.rows = decoder, prefixes, rows
        shared = shared_tokens(decoder, rows)
        self.prompt = None
        if shared:
            self.prompt = decoder.empty(decoder.layers, 2, decoder.heads, shared, decoder.head_size)
            cast(Any, rows[0].prefix).cached.copy_to(self.prompt, 0)
        known, new = max(row.known for row in rows) - shared, max(len(row.ids) - row.known for row in rows)
        self.prompt_end = known + new
        self.filled = self.prompt_end
        length = self.filled + max(row.request.max_new_tokens for row in rows)
        self.buffer = decoder.buffer(decoder.layers, 2, len(rows), decoder.heads, length, decoder.head_size)
        self.mask = torch.zeros(len(rows), length, dtype=torch.long)
        self.ids = torch.zeros(len(rows), new, dtype=torch.long)
        self.positions = torch.zeros(len(rows), new, dtype=torch.long)
        for i, row in enumerate(rows):
            chunk, pad = len(row.ids) - row.known, known - (row.known - shared)
            own = self.buffer[:, :, i]
            if row.prefix.cached is not None:
                row.prefix.cached.copy_to(own[..., pad:known, :], shared)
            # what is masked out has to be finite; all else is written before it is read
            own[..., :pad, :] = 0
            own[..., known : self.prompt_end - chunk, :] = 0
            self.mask[i, pad:known] = 1
            self.mask[i, self.filled - chunk : self.filled] = 1
            self.ids[i, new - chunk :] = torch.tensor(row.ids[row.known :])
            self.positions[i, new - chunk :] = torch.arange(row.known, len(row.ids))
        self._layers(known)

    def _layers(self, filled: int) -> None:
        self.cache = DynamicCache()
        self.cache.layers = [_BufferLayer(layer, filled) for layer in self.buffer]

    def run(self) -> None:
        device, active = self.buffer.device, list(range(len(self.rows)))
        with shared_prompt(self.decoder.model, self.prompt):
            while active:
                logits = self.decoder.forward(
                    self.cache,
                    input_ids=self.ids.to(device),
                    attention_mask=self.mask[:, : self.filled].to(device),
                    position_ids=self.positions.to(device),
                )
                tokens = self._sample(logits)
                if active := [i for i, row in enumerate(self.rows) if not self._finished(i, row)]:
                    self._advance(tokens, active)

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        """One token per row, drawn from softmax(logits / temperature)."""
        temperatures = torch.tensor([row.request.temperature or 1.0 for row in self.rows], device=logits.device)
        logprobs = torch.log_softmax(logits / temperatures[:, None], dim=-1)
        tokens = self._draw(logprobs)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        if any(map(math.isnan, chosen)):
            raise FloatingPointError(BROKEN_WEIGHTS)
        for row, token, logprob in zip(self.rows, tokens.tolist(), chosen, strict=True):
            if not row.future.done():
                row.sampled.append(token)
                row.logprobs.append(logprob)
        return tokens

    def _draw(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Invert the cumulative distribution at the row's own random number, which no other row changes."""
        tokens = logprobs.argmax(dim=-1)
        if numbers := {i: row.random.random() for i, row in enumerate(self.rows) if row.random is not None}:
            sampled = list(numbers)
            cumulative = logprobs[sampled].double().exp().cumsum(dim=-1)
            thresholds = torch.tensor(list(numbers.values()), dtype=torch.float64).to(cumulative.device) * cumulative[:, -1]
            drawn = torch.searchsorted(cumulative, thresholds[:, None], right=True)[:, 0]
            tokens[sampled] = drawn.clamp(max=logprobs.shape[1] - 1)
        return tokens

    def _finished(self, i: int, row: Row) -> bool:
        """True for a row at its end, which is answered. It leaves the batch when that next shrinks."""
        if row.future.done():
            return True
        ended, request = row.sampled[-1] in self.decoder.ends, row.request
        if not (ended or request.on_text or request.stop or len(row.sampled) >= request.max_new_tokens):
            return False
        text, cut = request.reply(self.decoder.tokenizer, row.sampled)
        over = ended or cut or len(row.sampled) >= request.max_new_tokens
        if not over:
            stream_settled_text(row, text)
            return False
        own, new = self.buffer[:, :, i], self.prompt_end - (len(row.ids) - row.known)
        end = self.decoder.tokenizer.decode(row.sampled[-1:]) if ended else ""
        self.prefixes.keep(
            request,
            row.prefix,
            reply=text,
            text=row.text + text[len(request.forced) :] + end,
            ids=row.ids + row.sampled,
            new=own[..., new : self.filled, :],
        )
        reason = "stop" if ended or cut else "length"
        row.future.set_result(Generated(text, row.ids, row.sampled, row.logprobs, reason))
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
