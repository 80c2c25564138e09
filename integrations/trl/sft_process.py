"""Supervised fine-tuning in a process of its own, which computes while this process does something else."""

import contextlib
import pickle
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, BinaryIO

import torch

from dreamgym_lg.errors import ProcessLost
from dreamgym_lg.integrations.transformers.child_process import end_child, portable, start_child
from dreamgym_lg.integrations.trl.sft import fine_tune

_OnStep = Callable[[int, float], None]


def fine_tune_beside(
    meanwhile: Callable[[], None] | None,
    *args: Any,
    on_step: _OnStep,
    on_end: Callable[[], None] | None = None,
    **options: Any,
) -> float:
    """`fine_tune` in a process of its own, while this one does something else, each on half of the threads.

    A small model hardly gains by more of them. With a GPU, which they would have to share, or one thread, nothing is done
    meanwhile, and the model is trained in this process.

    Args:
        meanwhile: What this process does, where it is called at all; None: nothing. What it raises ends the training.
        args, options: Of `fine_tune`; they have to be picklable.
        on_step: As of `fine_tune`; called by another thread.
        on_end: Called by that thread as soon as the model is written, unless it is trained in this process.

    Raises, once `meanwhile` is done, what `fine_tune` raises, and `ProcessLost` if the process ends before it is.
    """
    threads = torch.get_num_threads()
    if meanwhile is None or torch.cuda.is_available() or threads < 2:
        return fine_tune(*args, on_step=on_step, **options)
    child = start_child(__name__, OMP_NUM_THREADS=str(threads - threads // 2))
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            loss = pool.submit(_follow, child, pickle.dumps((args, options)), on_step, on_end)
            torch.set_num_threads(threads // 2)
            meanwhile()
            return loss.result()
        finally:
            end_child(child)  # the thread that reads it ends then, and the pool waits for it
            torch.set_num_threads(threads)


def _follow(child: "subprocess.Popen[bytes]", given: bytes, on_step: _OnStep, on_end: Callable[[], None] | None) -> float:
    """What the process says, until it ends."""
    sent, said = child.stdin, child.stdout
    assert sent is not None and said is not None
    with contextlib.suppress(BrokenPipeError):  # the end of what it says tells that it is gone
        sent.write(given)
        sent.flush()
    with said:
        while True:
            try:
                kind, *value = pickle.load(said)
            except (EOFError, pickle.UnpicklingError) as error:
                raise ProcessLost(
                    f"the process of a supervised training has ended (status {child.wait()}: -9 may be a lack of memory): run "
                    "the same command once more, which begins it again"
                ) from error
            if kind == "step":
                on_step(*value)
            elif kind == "error":
                raise value[0]
            else:
                if on_end is not None:
                    on_end()
                return float(value[0])


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """The child: trains what it is told, says each step and the end. With its parent gone, the next step is a broken pipe."""
    args, options = pickle.load(requests)

    def send(*item: Any) -> None:
        pickle.dump(item, replies)
        replies.flush()

    try:
        send("done", fine_tune(*args, on_step=partial(send, "step"), **options))
    except Exception as error:
        send("error", portable(error))
