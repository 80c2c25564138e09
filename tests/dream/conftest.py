"""pytest's importlib mode puts no folder on the path, so `import orders` needs this; a replay buffer in memory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from collections.abc import Iterator

import pytest

from dreamgym_lg.replay.buffer import ReplayBuffer


@pytest.fixture
def buffer() -> Iterator[ReplayBuffer]:
    with ReplayBuffer(":memory:") as buffer:
        yield buffer
