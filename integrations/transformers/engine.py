"""`LocalEngine`: generates a model's replies in this process.

One thread per model takes all calls that wait, runs them as one batch and keeps, per conversation, the keys and values of
every token already read. The next call of that conversation forwards new tokens alone. Sampling is seeded per call.
"""

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.batch import Batch, Decoder, Row, read_ahead
from dreamgym_lg.integrations.transformers.machine import give_back_memory
from dreamgym_lg.integrations.transformers.prefix_cache import PrefixCache, SharedPromptBlocks, cache_budget
from dreamgym_lg.integrations.transformers.requests import Generated, Request

IDLE_SECONDS = 0.0005
"""A batch is closed when no further call has come for this long.

Ten times as long while it is smaller than the batch before, whose callers are probably on their way."""

_Call = tuple[Request, Future[Generated]]

_one_batch_at_a_time = threading.Lock()
"""Models of this process take turns: while one answers, the calls to the other gather."""


class LocalEngine:
    """Generates the replies of a model in this process. Thread-safe; new weights answer from the next batch on.

    Args:
        model: A `transformers.PreTrainedModel`, or a PEFT model of one.
        max_batch_size: The most calls that share one forward pass.

    Raises `ConfigurationError` for a model without full attention, and for one spread over several devices.
    """

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, *, max_batch_size: int = 128) -> None:
        if max_batch_size < 1:
            raise ConfigurationError(f"max_batch_size={max_batch_size}: a batch holds one call or more")
        self.max_batch_size = max_batch_size
        self._decoder = Decoder(model, tokenizer)
        budget = cache_budget(self._decoder.model.device)
        self.prefixes = PrefixCache(budget)
        self._prompts = SharedPromptBlocks(budget // 4)
        self.ends = self._decoder.ends
        """The tokens that end a reply."""
        self._seeds = itertools.count()
        self._waiting: _Waiting = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._waiting,), name="dreamgym-engine", daemon=True).start()
        # the thread holds no engine: model and cache go with their user
        weakref.finalize(self, self._waiting.put, None).atexit = False  # a process that ends needs no word to its daemons

    def submit(self, request: Request) -> "Future[Generated]":
        """Ask for a reply; returns at once."""
        future: Future[Generated] = Future()
        self._waiting.put((self, (request, future)))
        return future

    def clear(self) -> None:
        """Forget every cached key and value, and give their memory back."""
        with _one_batch_at_a_time:
            self.prefixes.clear()
            self._prompts.clear()
            self._decoder.free_buffer()
        give_back_memory()  # else 64 episodes of SmolLM2 went up to 14 GB

    @torch.inference_mode()
    def answer(self, calls: Sequence[_Call]) -> None:
        """Answer every call, as one batch, or set its exception."""
        rows = []
        for request, future in calls:
            if not future.set_running_or_notify_cancel():
                continue  # the caller has gone
            try:
                rows.append(self._row(request, future))
            except Exception as error:
                future.set_exception(error)
        if rows:
            model = self._decoder.model
            training = model.training
            model.eval()
            try:
                with self._decoder.autocast():
                    room = self.prefixes.budget
                    for row in rows:
                        room -= read_ahead(self._decoder, self._prompts, row, room)
                    for part in self._parts(rows):
                        Batch(self._decoder, self.prefixes, part).run()
            finally:
                if training:  # else a trainer may have begun since the last answer was given
                    model.train()

    def _parts(self, rows: list[Row]) -> Iterator[list[Row]]:
        """The rows in batches that fit into the budget. In a batch each is padded to the longest."""

        def length(row: Row) -> int:
            return len(row.ids) + row.request.max_new_tokens

        most = self.prefixes.budget // self._decoder.token_bytes
        if len(rows) * max(map(length, rows)) > most:
            rows = sorted(rows, key=length)
        part = list[Row]()
        for row in rows:
            if part and (len(part) + 1) * length(row) > most:
                yield part
                part = []
            part.append(row)
        yield part

    def _row(self, request: Request, future: "Future[Generated]") -> Row:
        text, ids, prefix = self.prefixes.encode(self._decoder.tokenizer, request, self._decoder.max_tokens)
        seed = next(self._seeds) if request.seed is None else request.seed
        return Row(request, future, text, ids, prefix, Random(seed) if request.temperature > 0 else None)


_Waiting = queue.SimpleQueue[tuple[LocalEngine, _Call] | None]


def _serve(waiting: _Waiting) -> None:
    """The engine's thread; None ends it. An engine that waits for work is held by nobody here."""
    expected = 0
    while (item := waiting.get()) is not None:
        engine, first = item
        calls = [first]
        with _one_batch_at_a_time:
            _gather(waiting, calls, expected, engine.max_batch_size)
            expected = len(calls)
            try:
                engine.answer(calls)
            except BaseException as error:  # a waiting episode must hear of it, whatever it is
                for _, future in calls:
                    if not future.done():
                        future.set_exception(error)
        del engine, item, first, calls


def _gather(waiting: _Waiting, calls: list[_Call], expected: int, most: int) -> None:
    """Add the calls that come until none has come for a while."""
    idle = 0
    while len(calls) < most:
        if not waiting.empty():
            item = waiting.get()
            assert item is not None, "an engine with a caller is not ended"
            calls.append(item[1])
            idle = 0
        elif idle < (1 if len(calls) >= expected else 10):
            # no get(timeout=...): a thread that is held up past so short a time waits for ever there (CPython 3.11)
            time.sleep(IDLE_SECONDS)
            idle += 1
        else:
            break
