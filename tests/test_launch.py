"""What a process of a launcher knows of the others, and what it leaves to rank 0."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langchain_core.language_models import FakeListChatModel

from dreamgym_lg import DreamGym, ReplayBuffer, Task
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.launch import Launch, launched

Tell = Callable[..., None]


@pytest.fixture(name="tell")
def _tell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tell]:
    """Sets what a launcher does."""

    def tell(rank: int, size: int = 4, **others: str) -> None:
        values = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), **others}
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launched.cache_clear()
    yield tell
    launched.cache_clear()


def test_a_process_alone_has_no_launch(tell: Tell) -> None:
    assert launched() is None
    launched.cache_clear()
    tell(0, 1)
    assert launched() is None and "RANK" not in os.environ


def test_no_library_sees_the_other_processes(tell: Tell) -> None:
    tell(2)
    assert launched() == launched() == Launch(2, 4)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys()


@pytest.mark.parametrize(
    ("visible", "own"), [("4,5,6,7", "6"), ("GPU-a,GPU-b,GPU-c", "GPU-c"), ("3", "3"), ("", ""), (None, "2")]
)
def test_each_process_sees_its_own_gpu(tell: Tell, monkeypatch: pytest.MonkeyPatch, visible: str | None, own: str) -> None:
    tell(2)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launched()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "process 3 of this machine has no GPU; start 2"),
        ({"ACCELERATE_USE_FSDP": "true"}, "configured for FSDP, .* torchrun"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "configured for DEEPSPEED"),
    ],
)
def test_what_cannot_be_is_refused(tell: Tell, others: dict[str, str], told: str) -> None:
    tell(2, **others)
    with pytest.raises(ConfigurationError, match=told):
        launched()


def test_other_ranks_leave_folder_and_replay_buffer_to_the_first(tell: Tell, tmp_path: Path) -> None:
    tell(1, 2)
    model = FakeListChatModel(responses=["?"])
    graph = create_episode_graph(model).compile()
    buffer = ReplayBuffer(tmp_path / "replay.db")
    gym = DreamGym(
        graph,
        replay_buffer=buffer,
        experience_model=model,
        tasks=[Task(id="t", instruction="do it", environment="e")],
        out=tmp_path / "run",
        verify_dream=lambda task, state: 1.0,
    )
    gym.prepare()
    gym.train_experience()
    gym.train_base()
    with pytest.raises(ConfigurationError, match="several processes run this script"):
        gym.evaluate(model)
    assert buffer.count("tasks") == 0 and not (tmp_path / "run").exists()
