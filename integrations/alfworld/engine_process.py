"""The process that plays ALFWorld's games for all environments of this one: its engine keeps about 0.9 MB of every game.

Questions and answers are pickled over its standard input and output. It ends with its parent, or when it has been renewed and
no game is left in it.
"""

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from dreamgym_lg.errors import EnvironmentFailed, MissingDependency

if find_spec("alfworld") is None or find_spec("textworld") is None:
    raise MissingDependency.extra("alfworld", "alfworld")

RENEWED_AFTER = 500
"""Games loaded, the same one again included, after which the next is loaded into a new process."""
_CHILD = """
import os
given, sent = os.dup(0), os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the planner talks
from dreamgym_lg.integrations.alfworld.engine import main
main(given, sent)
"""


class Shown(NamedTuple):
    """What a game shows after it was loaded or after an action."""

    text: str
    won: bool
    admissible: list[str]


class _Worker:
    def __init__(self) -> None:
        python_path = os.pathsep.join(str(path) or os.getcwd() for path in sys.path)
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, whose episodes still ask while they come to their end
            env={**os.environ, "PYTHONPATH": python_path},
        )
        weakref.finalize(self, _end, self.child)
        self.loaded = 0
        self._asking = threading.Lock()

    def ask(self, number: int, asked: Mapping[str, Any] | str) -> Shown:
        """What the game of this number shows. Raises `EnvironmentFailed`, and then the game is lost."""
        with self._asking:
            try:
                self.tell(number, asked)
                answer: Shown | str = pickle.load(self.child.stdout)  # type: ignore[arg-type] # a pipe was asked for
            except BaseException as error:  # also of Ctrl-C: the answer would be taken for that to the next question
                self.child.kill()
                if not isinstance(error, OSError | EOFError | pickle.UnpicklingError):
                    raise
                raise EnvironmentFailed(
                    f"the process of ALFWorld's engine has ended (status {self.child.wait()}: -9 may be a lack of memory); "
                    "the next episode starts another one"
                ) from error
        if isinstance(answer, str):
            raise EnvironmentFailed(answer)
        return answer

    def tell(self, number: int, asked: Mapping[str, Any] | str | None) -> None:
        pipe: Any = self.child.stdin
        pickle.dump((number, asked), pipe)
        pipe.flush()

    def close(self, number: int) -> None:
        with self._asking, contextlib.suppress(OSError):
            self.tell(number, None)


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):  # what could not be sent any more
            pipe.close()  # type: ignore[union-attr] # both are pipes


_NUMBERS = itertools.count()
_CHOOSING = threading.Lock()
_newest: _Worker | None = None


def _choose() -> _Worker:
    """The process that the next game is loaded into."""
    global _newest
    with _CHOOSING:
        if _newest is None or _newest.loaded >= RENEWED_AFTER or _newest.child.poll() is not None:
            _newest = _Worker()
        _newest.loaded += 1
        return _newest


class Game:
    """A game in the process that plays it; `shown` is what it shows now."""

    def __init__(self, game: Mapping[str, Any]) -> None:
        """Load `game`, what a `game.tw-pddl` holds. Raises `EnvironmentFailed` if the engine cannot."""
        self._worker, self._number = _choose(), next(_NUMBERS)
        self.shown = self._worker.ask(self._number, game)

    def step(self, action: str) -> None:
        """Raises `EnvironmentFailed` if the engine breaks; the game cannot be played on then."""
        self.shown = self._worker.ask(self._number, action)

    def close(self) -> None:
        """Leave the engine to other games."""
        self._worker.close(self._number)
