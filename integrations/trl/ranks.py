"""The processes of one training: rows come from rank 0, gradients are added up.

Not by accelerate's DDP, which fits neither passes of unequal rows, nor that of a shared beginning, nor a critic. Each process
has a trainer of its own, and gradients are added up once, before the optimiser's step.
"""

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Work, rendezvous

from dreamgym_lg.errors import ConfigurationError, ProcessLost
from dreamgym_lg.launch import Launch, launched

_PATIENCE = timedelta(days=7)
"""Other ranks wait while rank 0 plays. A process that dies is noticed at once, by its closed connections or by the launcher."""


class Ranks:
    """The joined processes of a training. All of them have to make the same calls in the same order.

    Every method raises `ProcessLost` where another process has died or cannot be reached.
    """

    def __init__(self, launch: Launch) -> None:
        self.rank, self.size, self._closed = *launch, False
        where = f"env://?rank={self.rank}&world_size={self.size}"
        store = self._waited(lambda: next(rendezvous(where, timeout=_PATIENCE))[0])
        # the launcher's store outlives its processes, and holds the addresses of those that it has started anew
        self._store = PrefixStore(f"dreamgym/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        # no default process group, by which other libraries would think that they are to take part
        cpu = PrefixStore("cpu", self._store)
        self._group = self._waited(lambda: ProcessGroupGloo(cpu, self.rank, self.size, _PATIENCE))

    def close(self) -> None:
        """On rank 0, broadcast None, with which the others end."""
        self.broadcast(None)
        self._closed = True

    def broadcast(self, value: object = None, *, source: int = 0) -> Any:
        """The value of rank `source`, on every rank. Raises `ConfigurationError` once closed."""
        if self._closed:
            raise ConfigurationError("the other processes of this launch have ended with its first training: launch anew")
        message = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = torch.tensor([len(message)])
        self._send(self._group, length, source)
        if self.rank != source:
            message = torch.empty(int(length), dtype=torch.uint8)
        self._send(self._group, message, source)
        return pickle.loads(message.numpy().tobytes())

    def gather(self, value: object) -> list[Any]:
        """The values of all ranks, in their order."""
        return [self.broadcast(value, source=source) for source in range(self.size)]

    @torch.no_grad()
    def broadcast_from_rank0(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the tensors those of rank 0."""
        for tensor in tensors:
            own = tensor.contiguous()
            self._send(self._of(tensor), own, 0)
            tensor.copy_(own)

    def add_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        for work in self._waited(lambda: [self._of(tensor).allreduce([tensor]) for tensor in tensors]):
            self._waited(work.wait)

    def add_up_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """As `add_up`, of the gradients of those parameters that have one on any rank."""
        parameters = list(parameters)
        used = torch.tensor([int(each.grad is not None) for each in parameters])
        self.add_up([used])
        for each, count in zip(parameters, used.tolist(), strict=True):
            if count and each.grad is None:
                each.grad = torch.zeros_like(each)
        self.add_up(each.grad for each in parameters if each.grad is not None)

    def _of(self, tensor: torch.Tensor) -> Any:
        return self._gpu_group if tensor.is_cuda else self._group

    @cached_property
    def _gpu_group(self) -> Any:
        from torch.distributed import ProcessGroupNCCL  # PyTorch for the CPU has none

        gpu = PrefixStore("gpu", self._store)
        return ProcessGroupNCCL(gpu, self.rank, self.size, ProcessGroupNCCL.Options())

    def _send(self, group: Any, tensor: torch.Tensor, source: int) -> None:
        work: Work = self._waited(lambda: group.broadcast(tensor, source))
        self._waited(work.wait)

    def _waited(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise ProcessLost(
                f"rank {self.rank} of {self.size}: another process of this training has died or cannot be reached; the "
                "launcher names it. The same command goes on from the last checkpoint"
            ) from error


def join_ranks(device: torch.device | None = None) -> Ranks | None:
    """The joined processes of this training; None where this is the only one. Returns once all of them are there.

    Args: `device`, that this one trains on.

    Raises `ConfigurationError` where something else has joined them before, and for devices of different kinds.
    """
    ranks = _join()
    if ranks is not None and device is not None and len(kinds := set(ranks.gather(device.type))) > 1:
        raise ConfigurationError(f"the processes train on {' and '.join(sorted(kinds))}: launch no more than there are GPUs")
    return ranks


@cache
def _join() -> Ranks | None:
    launch = launched()
    if launch is None:
        return None
    if torch.distributed.is_initialized():
        raise ConfigurationError(
            "the processes of this launch are joined already, by accelerate or torch.distributed: make the DreamGym, the "
            "Experiment or the learner before any Accelerator, TrainingArguments or process group"
        )
    if launch.rank == 0:
        _explain_end()
    elif threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C lets rank 0 finish what it does, with the others
    return Ranks(launch)


def _explain_end() -> None:
    """Explain the SIGTERM by which a launcher ends rank 0 after another rank has died."""

    def end(*_: Any) -> None:
        raise SystemExit(
            "rank 0 was ended (SIGTERM), as a launcher does when another rank has died: it names that rank. The same command "
            "goes on from the last checkpoint"
        )

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
