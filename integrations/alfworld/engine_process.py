"""The process that plays ALFWorld's games for all environments of this one.

Its engine keeps about 0.9 MB of every game. It ends with this process, or once it has been replaced and holds no game.
"""

import contextlib
import itertools
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from dreamgym_lg.child_process import Child
from dreamgym_lg.errors import EnvironmentFailed, MissingDependency, ProcessLost

if find_spec("alfworld") is None or find_spec("textworld") is None:
    raise MissingDependency.extra("alfworld", "alfworld")

RENEWED_AFTER = 500
"""Number of games loaded into a process before a new one is started."""


class GameState(NamedTuple):
    """The state of a game after it was loaded or after an action."""

    text: str
    won: bool
    admissible: list[str]


class _Worker:
    def __init__(self) -> None:
        self.child = Child(
            "dreamgym_lg.integrations.alfworld.engine",
            name="the process of ALFWorld's engine",
            advice="the next episode starts another one",
        )
        self.loaded = 0

    def ask(self, number: int, message: Mapping[str, Any] | str) -> GameState:
        """The state of the game of this number. Raises `EnvironmentFailed`, and then the game is lost."""
        try:
            state: GameState = self.child.ask((number, message))
        except ProcessLost as error:
            raise EnvironmentFailed(str(error)) from error
        return state

    def close(self, number: int) -> None:
        with contextlib.suppress(ProcessLost):
            self.child.send((number, None))


_NUMBERS = itertools.count()
_CHOOSING = threading.Lock()
_newest: _Worker | None = None


def _choose() -> _Worker:
    """The process that the next game is loaded into."""
    global _newest
    with _CHOOSING:
        if _newest is None or _newest.loaded >= RENEWED_AFTER or _newest.child.process.poll() is not None:
            _newest = _Worker()
        _newest.loaded += 1
        return _newest


class Game:
    """A game in the process that plays it, and its `state`."""

    def __init__(self, game: Mapping[str, Any]) -> None:
        """Load `game`, the contents of a `game.tw-pddl`. Raises `EnvironmentFailed` if the engine cannot."""
        self._worker, self._number = _choose(), next(_NUMBERS)
        self.state = self._worker.ask(self._number, game)

    def step(self, action: str) -> None:
        """Raises `EnvironmentFailed` if the engine breaks; the game cannot be played on then."""
        self.state = self._worker.ask(self._number, action)

    def close(self) -> None:
        """Leave the engine to other games."""
        self._worker.close(self._number)
