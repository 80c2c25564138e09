"""Supervised fine-tuning in a process of its own, while this one does something else."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import torch

from dreamgym_lg.child_process import Child, Pipes, portable
from dreamgym_lg.integrations.trl.sft import fine_tune

_OnStep = Callable[[int, float], None]


def fine_tune_beside(
    meanwhile: Callable[[], None] | None,
    *args: Any,
    on_step: _OnStep,
    on_end: Callable[[], None] | None = None,
    **options: Any,
) -> float:
    """`fine_tune` in a child process while this one calls `meanwhile`, on half the threads each.

    A small model hardly gains by more of them. With a GPU, which they would have to share, or one thread, `meanwhile` is not
    called, and the model is trained in this process.

    Args:
        meanwhile: None: the model is trained in this process. What it raises ends the training.
        args, options: Of `fine_tune`; they have to be picklable.
        on_step: As of `fine_tune`; called by another thread.
        on_end: Called by that thread as soon as the model is written, unless it is trained in this process.

    Raises, once `meanwhile` is done, what `fine_tune` raises, and `ProcessLost` if the process ends before it is.
    """
    threads = torch.get_num_threads()
    if meanwhile is None or torch.cuda.is_available() or threads < 2:
        return fine_tune(*args, on_step=on_step, **options)
    child = Child(
        __name__,
        name="the process of a supervised training",
        advice="run the same command once more, which begins it again",
        environment={"OMP_NUM_THREADS": str(threads - threads // 2)},
    )
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            loss = pool.submit(_follow, child, (args, options), on_step, on_end)
            torch.set_num_threads(threads // 2)
            meanwhile()
            return loss.result()
        finally:
            child.kill()  # the thread that reads it ends then, and the pool waits for it
            torch.set_num_threads(threads)


def _follow(child: Child, training: object, on_step: _OnStep, on_end: Callable[[], None] | None) -> float:
    """Send the training to the process and report its steps until its end; returns the loss."""
    child.send(training)
    while True:
        kind, *value = child.receive()
        if kind == "done":
            if on_end is not None:
                on_end()
            return float(value[0])
        on_step(*value)


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """The child: trains, and sends each step and the end. With its parent gone, the next step is a broken pipe."""
    parent = Pipes(requests, replies)
    args, options = parent.receive()
    try:
        loss = fine_tune(*args, on_step=lambda step, loss: parent.send(("step", step, loss)), **options)
        parent.send(("done", loss))
    except Exception as error:
        parent.send(portable(error))
