"""A causal language model as the engine's batches decode with it: forward passes, ends, memory for keys and values."""

import time
from collections import deque
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.guide import Guides
from dreamgym_lg.integrations.transformers.loading import cache_argument

asked_elsewhere: list[Sized] = []
"""The calls under way of each model that has a process of its own."""

PASSES = 10_000
"""Forward passes of a model whose times are remembered."""


def end_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | None) -> frozenset[int]:
    """The tokens that end a reply: the tokenizer's, and those of the model's generation settings."""
    ends = model.generation_config.eos_token_id if model is not None else None
    return frozenset({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})


class Decoder:
    """A causal language model with its tokenizer, as batches decode with it.

    Float32 weights on a GPU, which a policy in training has, compute in bfloat16 by autocast, as TRL's trainers do.

    Raises `ConfigurationError` for a model without full attention, and for one spread over several devices.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.passes: deque[tuple[float, float]] = deque(maxlen=PASSES)
        """When each of the last forward passes began and ended, by `time.perf_counter`."""
        config = self.model.config.get_text_config()
        self.layers = config.num_hidden_layers
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.vocabulary = config.vocab_size
        self.max_tokens = getattr(config, "max_position_embeddings", 1 << 30)
        _check_attention(config, self.max_tokens)
        devices = sorted({str(parameter.device) for parameter in self.model.parameters()})
        if len(devices) > 1:
            raise ConfigurationError(
                f"the model is spread over {', '.join(devices)}, and a batch keeps its keys and values on one device: load it "
                "with device='auto', or with a device_map that names one device"
            )
        self.ends = end_tokens(tokenizer, model)
        self._cache_argument = cache_argument(model)
        self._buffer = torch.empty(0)
        self._shares_cores = False

    @cached_property
    def guides(self) -> Guides:
        """Made for the first guided request, in about a second."""
        return Guides(self.tokenizer, self.vocabulary, sorted(self.ends))

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of activations, keys and values."""
        autocast = self.model.device.type == "cuda" and self.model.dtype == torch.float32
        return torch.bfloat16 if autocast else self.model.dtype

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """For the whole of a batch: with autocast the weights are cast once, at its first pass; threads that a pass has left to
        another process are taken back at the end.

        Nothing may train meanwhile: cast weights and the number of threads are the process's, and the former have no gradient.
        """
        enabled, threads = self.compute_dtype != self.model.dtype, torch.get_num_threads()
        try:
            with torch.autocast(self.model.device.type, dtype=self.compute_dtype if enabled else None, enabled=enabled):
                yield
        finally:
            if self._shares_cores:
                torch.set_num_threads(threads)
                self._shares_cores = False

    def _share_cores(self) -> None:
        """Leave half of the threads to a model of another process that owes a reply, until the end of the batch.

        Both are slower where they share cores, and a new number of threads takes a while.
        """
        if not self._shares_cores and self.model.device.type == "cpu" and any(asked_elsewhere):
            torch.set_num_threads(max(torch.get_num_threads() // 2, 1))
            self._shares_cores = True

    def forward(self, cache: DynamicCache, positions: int = 1, **inputs: Any) -> torch.Tensor:
        """Logits of the last positions, [batch, positions, vocabulary], float32.

        Args: `cache`, to which keys and values are added.
        """
        start = time.perf_counter()
        inputs |= {self._cache_argument: cache, "use_cache": True, "logits_to_keep": positions}
        self._share_cores()
        logits: torch.Tensor = self.model(**inputs).logits[:, -positions:].float()
        self.passes.append((start, time.perf_counter()))
        return logits

    def read(self, ids: list[int], buffer: torch.Tensor, known: int) -> None:
        """Read the tokens behind the first `known` ones of a conversation, whose keys and values are in the buffer.

        Theirs are written behind those. Args: `buffer`, [layers, 2, heads, tokens or more, head size].
        """
        device, cache = self.model.device, DynamicCache()
        cache.layers = [BufferLayer(layer[:, None], known) for layer in buffer]
        positions = torch.arange(known, known + len(ids), device=device)[None]
        self.forward(cache, input_ids=torch.tensor([ids], device=device), position_ids=positions)

    def buffer(self, size: int) -> torch.Tensor:
        """Memory for the keys and values of one batch, the same every time: fresh memory costs more than what it is for."""
        dtype, device = self.compute_dtype, self.model.device
        if self._buffer.numel() < size or (dtype, device) != (self._buffer.dtype, self._buffer.device):
            self._buffer = torch.empty(size, dtype=dtype, device=device)
        return self._buffer[:size]

    def free_buffer(self) -> None:
        """Give that memory back."""
        self._buffer = torch.empty(0)


def _check_attention(config: PreTrainedConfig, max_tokens: int) -> None:
    """A batch has gaps between its tokens, which a window would count: attention has to be full."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or (["sliding_attention"] if window else ["full_attention"]))
    if window is not None and window >= 2 * max_tokens:
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        raise ConfigurationError(
            f"{config.model_type} has layers of {', '.join(sorted(kinds - {'full_attention'}))}, "
            f"sliding_window={window}; answers are exact with full attention alone: choose another model"
        )


class BufferLayer(DynamicLayer):
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
