"""`ProcessEngine`: a model in a process of its own, which computes while this process does instead of taking turns with it."""

import contextlib
import gc
import itertools
import logging
import os
import pickle
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from dreamgym_lg.errors import ProcessLost
from dreamgym_lg.integrations.transformers.batch import PASSES
from dreamgym_lg.integrations.transformers.child_process import end_child, portable, start_child
from dreamgym_lg.integrations.transformers.engine import LocalEngine
from dreamgym_lg.integrations.transformers.loading import load_model, load_tokenizer
from dreamgym_lg.integrations.transformers.requests import Generated, Request

_Asked = dict[int, tuple[Request, "Future[Generated]"]]

_GIVES_BACK = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
"""Settings of glibc: keys and values of all lengths come and go, and what is freed is not kept in pieces of no use."""


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
        self._child = start_child(__name__, **{name: os.environ.get(name, value) for name, value in _GIVES_BACK.items()})
        weakref.finalize(self, end_child, self._child)
        self.passes: deque[tuple[float, float]] = deque(maxlen=PASSES)
        """When each of the last 10,000 forward passes began and ended, by `time.perf_counter`."""
        self._asked, self._ids, self._writing = _Asked(), itertools.count(), threading.Lock()
        self._send({"path": path, "max_batch_size": max_batch_size, **loading})
        pipe: Any = self._child.stdout
        try:
            loaded = pickle.load(pipe)
        except (EOFError, pickle.UnpicklingError):
            loaded = ProcessLost(f"the process for {str(path)!r} ended before the model was loaded: standard error says why")
        if isinstance(loaded, Exception):
            raise loaded
        self.ends: frozenset[int] = loaded
        """The tokens that end a reply."""
        given = (self._child, self._asked, self.passes)
        threading.Thread(target=_read, args=given, name="dreamgym-engine", daemon=True).start()

    def submit(self, request: Request) -> "Future[Generated]":
        """Ask for a reply; returns at once."""
        future: Future[Generated] = Future()
        number, streamed = next(self._ids), request.on_text is not None
        pickled = pickle.dumps(replace(request, on_text=None))
        self._asked[number] = request, future
        if not self._send((number, streamed, pickled)) and self._asked.pop(number, None) is not None:  # else it has been told
            future.set_exception(_lost(self._child))
        return future

    def clear(self) -> None:
        """Forget every cached key and value."""
        self._send(None)

    def _send(self, item: Any) -> bool:
        """Whether the process is there to read it."""
        pipe: Any = self._child.stdin
        with self._writing, contextlib.suppress(OSError):
            pickle.dump(item, pipe)
            pipe.flush()
            return True
        return False


def _read(child: Any, asked: _Asked, passes: deque[tuple[float, float]]) -> None:
    """The thread that hands on what the process says, and its end. It holds no engine: the process ends with its user."""
    try:
        while True:
            number, kind, value = pickle.load(child.stdout)
            if kind == "passes":
                passes.extend(value)
            elif kind == "text":
                on_text = asked[number][0].on_text
                assert on_text is not None, "no text is sent to who did not ask for it"
                on_text(value)
            elif (future := asked.pop(number)[1]).set_running_or_notify_cancel():
                future.set_exception(value) if kind == "error" else future.set_result(value)
    except EOFError:
        pass
    except Exception:  # cut off within a reply, or what cannot be read here: nobody may wait for more
        logging.getLogger(__name__).exception("what the process of the model said cannot be read")
    child.kill()
    child.wait()  # from now on nothing can be sent
    child.stdout.close()
    for number in list(asked):
        unanswered = asked.pop(number, None)
        if unanswered is not None and unanswered[1].set_running_or_notify_cancel():
            unanswered[1].set_exception(_lost(child))


def _lost(child: Any) -> ProcessLost:
    return ProcessLost(
        f"the process of the model has ended (status {child.wait()}: -9 may be a lack of memory): load it again, or "
        "run the same command once more, which goes on where it was"
    )


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """The child: loads what it is told first, answers all else, and ends where its input does."""
    sending = threading.Lock()

    def send(item: Any) -> None:
        with sending:
            pickle.dump(item, replies)
            replies.flush()

    def answer(number: int, future: "Future[Generated]") -> None:
        send((0, "passes", [engine.passes.popleft() for _ in range(len(engine.passes))]))
        error = future.exception()
        send((number, "error", portable(error)) if error else (number, "reply", future.result()))

    try:
        engine = _load(**pickle.load(requests))
    except Exception as error:
        return send(portable(error))
    gc.freeze()
    send(engine.ends)
    with contextlib.suppress(EOFError):
        while True:
            if (item := pickle.load(requests)) is None:
                engine.clear()
                continue
            number, streamed, pickled = item
            try:
                request = pickle.loads(pickled)
            except Exception as error:
                send((number, "error", portable(error)))
                continue
            request.on_text = (lambda text, number=number: send((number, "text", text))) if streamed else None
            engine.submit(request).add_done_callback(partial(answer, number))
    os._exit(0)  # also out of a batch: nobody waits for it


def _load(path: str | Path, *, max_batch_size: int, **loading: Any) -> LocalEngine:
    return LocalEngine(load_model(path, **loading), load_tokenizer(path, **loading), max_batch_size=max_batch_size)
