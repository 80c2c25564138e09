"""What is free: a container's limits count, of both versions of control groups."""

import sys
from pathlib import Path
from subprocess import run
from types import SimpleNamespace

import pytest
import torch

from dreamgym_lg.integrations.transformers import machine
from dreamgym_lg.integrations.transformers.machine import allowed_cores, free_memory
from dreamgym_lg.integrations.transformers.prefix_cache import cache_budget

GIB = 1 << 30
NONE = str(2**63 - 4096)
"""The limit of a group of the first version that has none."""
STAT = f"cache 7\ninactive_file {GIB}\ntotal_inactive_file {GIB}\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB and 16 cores."""
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


SECOND = {"memory.max": f"{8 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": STAT, "cpu.max": "250000 100000\n"}
FIRST = {
    "memory/{}memory.limit_in_bytes": f"{8 * GIB}\n", "memory/{}memory.usage_in_bytes": f"{3 * GIB}\n",
    "memory/{}memory.stat": STAT, "cpu/{}cpu.cfs_quota_us": "250000\n", "cpu/{}cpu.cfs_period_us": "100000\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "groups"),
    [
        ("0::/\n", {f"cgroup/{name}": text for name, text in SECOND.items()}),  # in a container
        ("0::/app.slice/job\n", {f"cgroup/app.slice/{name}": text for name, text in SECOND.items()}),  # of systemd, from above
        ("4:memory:/docker/a\n1:cpu,cpuacct:/docker/a\n", {f"cgroup/{name.format('')}": text for name, text in FIRST.items()}),
        ("4:memory:/job\n1:cpu:/job\n0::/\n", {f"cgroup/{name.format('job/')}": text for name, text in FIRST.items()}),
    ],
)
def test_a_container_has_what_its_limits_leave(root: Path, own: str, groups: dict[str, str]) -> None:
    write(root, {"proc/self/cgroup": own, **groups})
    (root / "cgroup/app.slice/job").mkdir(parents=True, exist_ok=True)
    assert free_memory() == 6 * GIB, "files that were read make room"
    assert cache_budget(torch.device("cpu")) == GIB
    assert allowed_cores() == 2


@pytest.mark.parametrize(
    ("own", "groups"),
    [
        ("", {}),
        ("0::/\n", {"cgroup/memory.max": "max\n", "cgroup/memory.current": "5\n", "cgroup/cpu.max": "max 100000\n"}),
        (
            "4:memory:/\n1:cpu:/\n",
            {
                "cgroup/memory/memory.limit_in_bytes": NONE, "cgroup/memory/memory.usage_in_bytes": "5",
                "cgroup/cpu/cpu.cfs_quota_us": "-1", "cgroup/cpu/cpu.cfs_period_us": "100000",
            },
        ),
    ],
)  # fmt: skip
def test_without_a_limit_it_is_the_machines(root: Path, own: str, groups: dict[str, str]) -> None:
    write(root, {"proc/self/cgroup": own, **groups})
    assert (free_memory(), allowed_cores()) == (64 * GIB, 16)


def test_a_container_over_its_limit_has_nothing(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "5", "cgroup/memory.current": "9"})
    assert free_memory() == 0 and cache_budget(torch.device("cpu")) == 0


@pytest.mark.parametrize(("busy", "threads"), [([0.0, 3.0, 99.0, 100.0], 2), ([100.0] * 4, 1), ([1.0] * 4, 4)])
def test_pytorch_computes_on_the_idle_cores(busy: list[float], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[int]()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine.psutil, "cpu_percent", lambda *_, **__: busy)
    monkeypatch.setattr(machine, "allowed_cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    machine.use_free_cores.__wrapped__()
    assert used == [threads]


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_the_memory_of_freed_tensors_is_used_again_and_given_back_on_request() -> None:
    code = """
import resource, psutil, torch
from dreamgym_lg.integrations.transformers.machine import give_back_memory, reuse_freed_memory

def pages() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(40):
        torch.ones(40 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = pages()
reuse_freed_memory()
less, kept = pages(), psutil.Process().memory_info().rss
give_back_memory()
print(usual, less, kept - psutil.Process().memory_info().rss)
"""
    printed = run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    usual, less, freed = map(int, printed.split())
    assert usual > 40 * 9_000 and less < usual / 4 and freed > 30 << 20
