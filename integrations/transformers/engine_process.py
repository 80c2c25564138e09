"""An `Engine` in a process of its own: a model that computes while this process does, instead of taking turns with it.

Requests and replies are pickled over the child's standard input and output. It is killed with its user, and ends where its
parent was killed: its input is closed then.
"""

import contextlib
import gc
import itertools
import logging
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from dreamgym_lg.errors import ProcessLost
from dreamgym_lg.integrations.transformers.batch import PASSES, Generated, Request

_NONE: Any = None  # a future cannot be sent

_CHILD = """
import os
given, sent = os.dup(0), os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)  # what a library prints is no reply
from dreamgym_lg.integrations.transformers.engine_process import main
main(given, sent)
"""


class EngineProcess:
    """What `Engine` is to a chat model. Thread-safe; `submit` returns at once."""

    def __init__(self, path: str, **options: Any) -> None:
        """Starts the process, and waits until it has loaded the model as `LocalChatModel.from_path` does, or raises as that."""
        python_path = os.pathsep.join(str(path) or os.getcwd() for path in sys.path)
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, whose episodes still ask while they come to their end
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": python_path},
        )  # fmt: skip
        weakref.finalize(self, _end, self._child)
        self.passes: deque[tuple[float, float]] = deque(maxlen=PASSES)
        self._asked, self._ids, self._writing = dict[int, Request](), itertools.count(), threading.Lock()
        self._send({"path": path, **options})
        pipe: Any = self._child.stdout
        try:
            loaded = pickle.load(pipe)
        except (EOFError, pickle.UnpicklingError):
            loaded = ProcessLost(f"the process for {path!r} ended before the model was loaded: standard error says why")
        if isinstance(loaded, Exception):
            raise loaded
        self.ends: set[int] = loaded
        given = (self._child, self._asked, self.passes)
        threading.Thread(target=_read, args=given, name="dreamgym-engine", daemon=True).start()

    def submit(self, request: Request) -> "Future[Generated]":
        number, streamed = next(self._ids), request.on_text is not None
        asked = pickle.dumps(replace(request, on_text=None, future=_NONE))
        self._asked[number] = request
        if not self._send((number, streamed, asked)) and self._asked.pop(number, None) is not None:  # else it has been told
            request.future.set_exception(_lost(self._child))
        return request.future

    def clear(self) -> None:
        """Forget all keys and values."""
        self._send(None)

    def _send(self, item: Any) -> bool:
        """Whether the process is there to read it."""
        pipe: Any = self._child.stdin
        with self._writing, contextlib.suppress(OSError):
            pickle.dump(item, pipe)
            pipe.flush()
            return True
        return False


def _read(child: Any, asked: dict[int, Request], passes: deque[tuple[float, float]]) -> None:
    """The thread that hands on what the process says, and its end. It holds no engine: the process ends with its user."""
    try:
        while True:
            number, kind, value = pickle.load(child.stdout)
            if kind == "passes":
                passes.extend(value)
            elif kind == "text":
                asked[number].on_text(value)  # type: ignore[misc]
            elif (future := asked.pop(number).future).set_running_or_notify_cancel():
                future.set_exception(value) if kind == "error" else future.set_result(value)
    except EOFError:
        pass
    except Exception:  # cut off within a reply, or what cannot be read here: nobody may wait for more
        logging.getLogger(__name__).exception("what the process of the model said cannot be read")
    child.kill()
    child.wait()  # from now on nothing can be sent
    child.stdout.close()
    for number in list(asked):
        request = asked.pop(number, None)
        if request is not None and request.future.set_running_or_notify_cancel():
            request.future.set_exception(_lost(child))


def _lost(child: Any) -> ProcessLost:
    return ProcessLost(
        f"the process of the model has ended (status {child.wait()}: -9 may be a lack of memory): load it again, or "
        "run the same command once more, which goes on where it was"
    )


def _end(child: Any) -> None:
    child.kill()  # it has nothing to save
    child.wait()
    with contextlib.suppress(OSError):
        child.stdin.close()


def main(given: int, sent: int) -> None:
    """The child: loads what it is told first, answers all else, and ends where its input does."""
    requests, replies, sending = os.fdopen(given, "rb"), os.fdopen(sent, "wb"), threading.Lock()

    def send(item: Any) -> None:
        with sending:
            pickle.dump(item, replies)
            replies.flush()

    def answer(number: int, future: "Future[Generated]") -> None:
        send((0, "passes", [engine.passes.popleft() for _ in range(len(engine.passes))]))
        error = future.exception()
        send((number, "error", _portable(error)) if error else (number, "reply", future.result()))

    try:
        from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

        engine: Any = LocalChatModel.from_path(**pickle.load(requests))._engine
    except Exception as error:
        return send(_portable(error))
    gc.freeze()
    send(engine.ends)
    with contextlib.suppress(EOFError):
        while True:
            if (item := pickle.load(requests)) is None:
                engine.clear()
                continue
            number, streamed, asked = item
            try:
                request = pickle.loads(asked)
            except Exception as error:
                send((number, "error", _portable(error)))
                continue
            request.on_text = (lambda text, number=number: send((number, "text", text))) if streamed else None
            request.future = Future()
            request.future.add_done_callback(partial(answer, number))
            engine.submit(request)
    os._exit(0)  # also out of a batch: nobody waits for it


def _portable(error: BaseException) -> BaseException:
    """What cannot be pickled and read again would end the reader."""
    try:
        same: BaseException = pickle.loads(pickle.dumps(error))
        return same
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
