"""The rank of this process among those of `torchrun` or `accelerate launch`.

Rank 0 plays, records and trains; the other ranks only take their share of its updates.
"""

import os
import sys
from functools import cache
from typing import NamedTuple

from dreamgym_lg.errors import ConfigurationError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Launch(NamedTuple):
    """A process among those that one command started."""

    rank: int
    size: int
    """How many they are, on all machines together."""


@cache
def launched() -> Launch | None:
    """This process among those of its launcher; None where it is the only one.

    The launcher's variables are taken out of the environment, and only the process's own GPU is left visible: libraries that
    would join the processes by themselves (accelerate) see one process on one GPU. Raises `ConfigurationError` for sharded
    weights, and where the process cannot have a GPU of its own.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise ConfigurationError(
                f"accelerate is configured for {name}, and a policy is whole on every GPU here: launch with torchrun, or with "
                "`accelerate launch --multi_gpu`; a model that is too large for one GPU is trained with lora=True"
            )
    _keep_own_gpu(int(os.environ.get("LOCAL_RANK", 0)))
    values = {name: int(os.environ.pop(name, 0)) for name in _VARIABLES}
    return Launch(values["RANK"], values["WORLD_SIZE"]) if values["WORLD_SIZE"] > 1 else None


def _keep_own_gpu(local_rank: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible is not None else []
    if visible is not None and len(gpus) < 2:  # one, or none, is what the launcher has chosen
        return
    if gpus and local_rank >= len(gpus):
        raise ConfigurationError(
            f"CUDA_VISIBLE_DEVICES={visible}: process {local_rank + 1} of this machine has no GPU; start {len(gpus)} here"
        )
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        raise ConfigurationError(
            "CUDA was in use before this process could choose its own GPU: make the DreamGym, the Experiment or the "
            "LocalChatModel first, or give each process one GPU by CUDA_VISIBLE_DEVICES"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank] if gpus else str(local_rank)
