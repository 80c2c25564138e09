"""The pytest plugin: `@pytest.mark.dream` and the fixture `dream`.

It tests versions of an agent on its recorded tasks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dreamgym_lg.experiment.comparison import SharedDream

_STORED = ("replay_buffer", "world", "experience_model")


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in _STORED:
        parser.addini(f"dream_{name}", f"{name}= of @pytest.mark.dream where it is not given; paths from pytest's root folder.")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "dream(tasks=200, episodes=4, ...): arguments of SharedDream for the fixture `dream`.")


@pytest.fixture
def dream(request: pytest.FixtureRequest) -> "Iterator[SharedDream]":
    """A `SharedDream` of the mark's arguments: `dream.play(agent).success`, `dream.compare(agent, new_agent)`.

    Raises `ConfigurationError` without a replay buffer that exists, and as `SharedDream` does.
    """
    from dreamgym_lg.errors import ConfigurationError
    from dreamgym_lg.experiment.comparison import SharedDream
    from dreamgym_lg.replay.buffer import ReplayBuffer

    mark, root = request.node.get_closest_marker("dream"), request.config.rootpath
    stored = {name: request.config.getini(f"dream_{name}") for name in _STORED}
    arguments: dict[str, Any] = {name: value for name, value in stored.items() if value} | (mark.kwargs if mark else {})
    file = root / arguments.pop("replay_buffer", "replay.db")
    if not file.is_file():
        raise ConfigurationError(
            f"{file} does not exist: `dreamgym import TRACES --to FILE`, and name it as dream_replay_buffer"
        )
    model = arguments.get("experience_model")
    names = ["world"] if arguments.get("world") else []
    if isinstance(model, str) and (root / model).is_dir():
        names.append("experience_model")
    arguments |= {name: str(root / arguments[name]) for name in names}
    with ReplayBuffer(file) as buffer:
        yield SharedDream(buffer, **arguments)
