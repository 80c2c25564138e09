"""`LongTraining`: one `train()` of a `PolicyTrainer` for a whole run.

Called anew in each iteration, it would reset optimiser and schedule.
"""

import queue
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from dreamgym_lg.integrations.trl.policy_trainer import OptimizerStep, PolicyTrainer, Stopped

Result = tuple[str | None, dict[str, float]]
"""Name of the checkpoint written after an iteration, if one was, and the iteration's metrics."""


class LongTraining(TrainerCallback):
    """Runs `trainer.train()` in a thread, which takes optimiser steps until `end`.

    Args: `path`, the folder of the checkpoints.
    """

    def __init__(self, trainer: PolicyTrainer, path: Path) -> None:
        self._trainer, self._path = trainer, path
        self._results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._logs: list[dict[str, float]] = []
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """Raised by the trainer: the weights are in an unknown state."""
        trainer.add_callback(self)

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def start(self, checkpoint: str | None) -> None:
        """Begin; returns once the weights of the checkpoint, if there is one, are in place."""
        self._ready.clear()
        self._thread = threading.Thread(target=self._train, args=(checkpoint,), name="dreamgym-learner", daemon=True)
        self._thread.start()
        self._ready.wait()
        if not self._results.empty():  # it ended before it began
            self._result()

    def run(self, steps: Iterable[OptimizerStep]) -> Result:
        """Take an iteration's optimiser steps. Raises what the trainer raised."""
        for step in steps:
            self._trainer.feed.put(step)
        return self._result()

    def run_here(self, checkpoint: str | None) -> None:
        """Train in this thread, until rank 0 ends. Raises what the trainer raised."""
        self._train(checkpoint)
        while not self._results.empty():
            self._result()

    def end(self, timeout: float | None) -> None:
        """End the thread. Args: `timeout`, seconds to wait for it; None: until it has ended."""
        if self._thread is not None:
            self._trainer.feed.put(None)
            self._thread.join(timeout)
            self._thread = None

    def _result(self) -> Result:
        result = self._results.get()
        if isinstance(result, BaseException):
            self.failure = result
            raise result
        return result

    # --- in the thread ------------------------------------------------------------------------------------------------------

    def _train(self, checkpoint: str | None) -> None:
        try:
            if self._trainer.model.device.type == "cuda":
                torch.cuda.set_device(self._trainer.model.device)  # each thread has its own current device
            self._trainer.train(resume_from_checkpoint=str(self._path / checkpoint) if checkpoint else None)
            self._results.put(RuntimeError(f"the trainer ended by itself at step {self._trainer.state.global_step}"))
        except Stopped:
            pass
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"micro_batch_tokens={self._trainer.micro_batch_tokens}: so many tokens are in one pass; fewer need less "
                "memory, for the same gradient"
            )
            self._results.put(error)
        except BaseException as error:
            self._results.put(error)
        finally:
            self._ready.set()

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._ready.set()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: object) -> None:
        self._logs.append(logs or {})
        if self._trainer.ends_iteration and not control.should_save:
            self._report(None)

    def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._report(f"checkpoint-{state.global_step}")

    def _report(self, checkpoint: str | None) -> None:
        """The means of an iteration's metrics over its optimiser steps."""
        names = {name for logs in self._logs for name in logs}
        numbers = {name: [logs[name] for logs in self._logs if isinstance(logs.get(name), (int, float))] for name in names}
        self._logs = []
        self._results.put((checkpoint, {name: sum(values) / len(values) for name, values in numbers.items() if values}))
