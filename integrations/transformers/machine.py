"""Free cores and memory of this machine or its container, and their use."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from ctypes import CDLL
from functools import cache
from pathlib import Path

import psutil
import torch

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _NEVER = -1, -3, -1
"""Parameters and value of glibc's `mallopt`."""
_LARGEST = 1 << 30, 32 << 20
"""Bytes of the largest tensors whose memory is kept: first what some versions of glibc refuse, then what all take."""


@cache
def use_free_cores() -> None:
    """Compute on the cores that are idle now, unless OMP_NUM_THREADS says on how many. Looks once, for a tenth of a second.

    PyTorch's threads wait for each other: two on two cores, beside a busy process, take ten times as long as one.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        idle = round(sum(100 - busy for busy in psutil.cpu_percent(0.1, percpu=True)) / 100)
        torch.set_num_threads(max(min(idle, allowed_cores(), torch.get_num_threads()), 1))


@cache
def reuse_freed_memory() -> None:
    """Keep the memory of freed tensors for the next ones, until `give_back_memory`.

    Else glibc gives it back at once, and the system clears it anew (docs/results/speed.md has where that costs time).
    """
    with suppress(OSError, AttributeError, TypeError):  # another C library
        libc = CDLL(None)
        if any(libc.mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST):
            libc.mallopt(_TRIM_THRESHOLD, _NEVER)


def give_back_memory() -> None:
    """Give freed memory back to the system. The holes between what is in use grow with every rollout and update."""
    with suppress(OSError, AttributeError, TypeError):
        CDLL(None).malloc_trim(0)


def allowed_cores() -> int:
    """Number of cores whose time this process may take. A container sees all of them."""
    cores = os.cpu_count() or 1
    for group in _control_groups("cpu"):
        share = _numbers(group / "cpu.max") or _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        if len(share) == 2:  # microseconds, of so many
            cores = min(cores, max(share[0] // share[1], 1))
    return cores


def free_memory() -> int:
    """Bytes of memory that this process may still take."""
    free = int(psutil.virtual_memory().available)
    for group in _control_groups("memory"):
        limit = _numbers(group / "memory.max") or _numbers(group / "memory.limit_in_bytes")
        used = _numbers(group / "memory.current") or _numbers(group / "memory.usage_in_bytes")
        if limit and used:
            cached = re.search(r"^inactive_file (\d+)", _text(group / "memory.stat"), re.MULTILINE)  # files, which make room
            free = min(free, limit[0] - used[0] + (int(cached[1]) if cached else 0))
    return max(free, 0)


def _control_groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups that limit this process, of both versions of cgroups."""
    for line in _text(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = _GROUPS / controller if controllers else _GROUPS
            own = top / path.lstrip("/")
            yield from (each for each in (own, *own.parents) if each.is_relative_to(top) and each.is_dir())


def _numbers(file: Path) -> list[int]:
    """The numbers of a file. None if it is not there, or sets no limit."""
    words = _text(file).split()
    return [int(word) for word in words] if all(map(str.isdigit, words)) else []


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""
