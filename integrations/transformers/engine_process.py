"""`ProcessEngine`: a model in a process of its own, computing beside this one."""

import contextlib
import gc
import itertools
import logging
import os
import pickle
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

import torch

from dreamgym_lg.child_process import Child, Pipes, portable
from dreamgym_lg.errors import ProcessLost
from dreamgym_lg.integrations.transformers.batch import PASSES
from dreamgym_lg.integrations.transformers.engine import LocalEngine
from dreamgym_lg.integrations.transformers.loading import load_model, load_tokenizer
from dreamgym_lg.integrations.transformers.requests import Generated, Request

_Waiting = dict[int, tuple[Request, "Future[Generated]"]]

_MEMORY_SETTINGS = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
"""Settings of glibc by which freed keys and values return to the system."""


class ProcessEngine:
    """Generates the replies of a model that a process of its own has loaded. Thread-safe.

    Starts the process and waits until the model is loaded, some seconds.

    Args:
        path: Folder or hub name of the model.
        max_batch_size: The most calls that share one forward pass.
        loading: Further arguments of `load_model`; they have to be picklable.

    Raises what `load_model` raises there, and `ProcessLost` if the process ends before.
    """

    def __init__(self, path: str | Path, *, max_batch_size: int = 128, **loading: Any) -> None:
        threads = {"OMP_NUM_THREADS": str(max(torch.get_num_threads() // 2, 1))}  # of as many, both processes would wait
        self._child = Child(
            __name__,
            name=f"the process of the model {str(path)!r}",
            advice="load it again, or run the same command once more, which goes on where it was",
            environment={name: os.environ.get(name, value) for name, value in {**_MEMORY_SETTINGS, **threads}.items()},
        )
        weakref.finalize(self, self._child.kill)  # the thread that reads holds the child
        self.passes: deque[tuple[float, float]] = deque(maxlen=PASSES)
        """When each of the last 10,000 forward passes began and ended, by `time.perf_counter`."""
        self._waiting, self._numbers = _Waiting(), itertools.count()
        self.ends: frozenset[int] = self._child.ask({"path": path, "max_batch_size": max_batch_size, **loading})
        """The tokens that end a reply."""
        Thread(target=_read, args=(self._child, self._waiting, self.passes), name="dreamgym-engine", daemon=True).start()

    def submit(self, request: Request) -> "Future[Generated]":
        """Request a reply; returns at once."""
        future: Future[Generated] = Future()
        number, streamed = next(self._numbers), request.on_text is not None
        pickled = pickle.dumps(replace(request, on_text=None))
        self._waiting[number] = request, future
        try:
            self._child.send((number, streamed, pickled))
        except ProcessLost as error:
            if self._waiting.pop(number, None) is not None:  # else the reading thread has set it
                future.set_exception(error)
        return future

    def clear(self) -> None:
        """Forget every cached key and value."""
        with contextlib.suppress(ProcessLost):
            self._child.send(None)


def _read(child: Child, waiting: _Waiting, passes: deque[tuple[float, float]]) -> None:
    """Hand on what the process sends, and its end. This thread holds no engine: the process ends with its user."""
    try:
        while True:
            number, kind, value = child.receive()
            if kind == "passes":
                passes.extend(value)
            elif kind == "text":
                on_text = waiting[number][0].on_text
                assert on_text is not None, "text is streamed on request alone"
                on_text(value)
            elif (future := waiting.pop(number)[1]).set_running_or_notify_cancel():
                future.set_exception(value) if kind == "error" else future.set_result(value)
    except ProcessLost as error:
        lost = error
    except Exception as error:
        logging.getLogger(__name__).exception("a message of the model's process cannot be read")
        child.kill()
        lost = ProcessLost(f"a message of the model's process cannot be read ({error}): load the model again")
    for number in list(waiting):
        unanswered = waiting.pop(number, None)
        if unanswered is not None and unanswered[1].set_running_or_notify_cancel():
            unanswered[1].set_exception(lost)


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """The child: loads a model, answers requests, and ends with its parent."""
    parent = Pipes(requests, replies)

    def answer(number: int, future: "Future[Generated]") -> None:
        parent.send((0, "passes", [engine.passes.popleft() for _ in range(len(engine.passes))]))
        error = future.exception()
        parent.send((number, "error", portable(error)) if error else (number, "reply", future.result()))

    try:
        engine = _load(**parent.receive())
    except Exception as error:
        return parent.send(portable(error))
    gc.freeze()
    parent.send(engine.ends)
    with contextlib.suppress(EOFError):
        while True:
            if (message := parent.receive()) is None:
                engine.clear()
                continue
            number, streamed, pickled = message
            try:
                request = pickle.loads(pickled)
            except Exception as error:  # of a class that is not importable here
                parent.send((number, "error", portable(error)))
                continue
            request.on_text = (lambda text, number=number: parent.send((number, "text", text))) if streamed else None
            engine.submit(request).add_done_callback(partial(answer, number))
    os._exit(0)  # also out of a batch: nobody waits for it


def _load(path: str | Path, *, max_batch_size: int, **loading: Any) -> LocalEngine:
    return LocalEngine(load_model(path, **loading), load_tokenizer(path, **loading), max_batch_size=max_batch_size)
