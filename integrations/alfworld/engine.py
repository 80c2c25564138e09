"""ALFWorld's engine, TextWorld's planner, ten times as fast, in a process that all environments share.

The engine keeps about 0.9 MB of every game. Its process ends with this one, or once it has been replaced and holds no game.
"""

import contextlib
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache, wraps
from importlib.util import find_spec
from typing import Any, BinaryIO, NamedTuple

from dreamgym_lg.child_process import Child, Pipes
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
            return self.child.ask((number, message))
        except ProcessLost as error:
            raise EnvironmentFailed(str(error)) from error

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
        """Load the contents of a `game.tw-pddl`. Raises `EnvironmentFailed` if the engine cannot."""
        self._worker, self._number = _choose(), next(_NUMBERS)
        self.state = self._worker.ask(self._number, game)

    def step(self, action: str) -> None:
        """Raises `EnvironmentFailed` if the engine breaks; the game cannot be played on then."""
        self.state = self._worker.ask(self._number, action)

    def close(self) -> None:
        """Leave the engine to other games."""
        self._worker.close(self._number)


# --- The child: it alone imports the engine -----------------------------------------------


class Engine:
    """One copy of the planner's library, and the game in it."""

    def __init__(self) -> None:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs.pddl import PddlEnv

        self._game = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))

    def start(self, game: Mapping[str, Any]) -> GameState:
        self._game.load(game)
        return _state(self._game.reset())

    def step(self, action: str) -> GameState:
        return _state(self._game.step(action)[0])


def _state(state: Mapping[str, Any]) -> GameState:
    return GameState(str(state["feedback"]), bool(state["won"]), list(state["admissible_commands"]))


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Play what the parent sends, until that is gone.

    Engines are used again: their library marks itself as never to be unloaded.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the planner talks
    speed_up()
    parent = Pipes(requests, replies)
    playing, idle = dict[int, Engine](), list[Engine]()
    while True:
        try:
            number, message = parent.receive()
        except EOFError:
            return
        if message is None:
            idle += [playing.pop(number)] if number in playing else []
            continue
        engine = playing.pop(number, None) or (idle.pop() if idle else Engine())
        reply: GameState | EnvironmentFailed
        try:
            reply = engine.step(message) if isinstance(message, str) else engine.start(message)
            playing[number] = engine
        except (Exception, SystemExit) as error:  # the translator ends the process over what it cannot read
            reply = EnvironmentFailed(repr(error))
        parent.send(reply)


# --- Speed -----------------------------------------------------------------------------------------------------------


def speed_up() -> None:
    """Make TextWorld's PDDL engine ten times as fast, with the same observations.

    Stock, it parses its grammar for every sentence, copies each object of it, and translates a game four times. It also
    overwrites `sys.argv`.
    """
    import fast_downward
    from textworld.envs.pddl import textgen
    from textworld.logic import Rule

    try:
        parse, query, translate = textgen._parse_and_convert, Rule.parse_conjunctive_query, fast_downward.pddl2sas
        copies = textgen.copy_context
    except AttributeError as error:
        warnings.warn(f"this TextWorld is another than 1.7 inside ({error}): ALFWorld runs, but slowly", stacklevel=2)
        return
    textgen._parse_and_convert = _parsed_once(parse)
    Rule.parse_conjunctive_query = staticmethod(lru_cache(maxsize=4096)(query))
    textgen.copy_context = wraps(copies)(_copy_context)
    fast_downward.pddl2sas = _translated_once(translate)


def _parsed_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    remembered = lru_cache(maxsize=4096)(parse)
    # a copy, because the engine writes the context of a sentence into its symbols
    return lambda *args, **kwargs: deepcopy(remembered(*args, **kwargs))


def _copy_context(context: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the two mappings that the engine changes, not their values."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def _translated_once(translate: Callable[..., Any]) -> Callable[..., Any]:
    """`pddl2sas` that remembers 32 games (3 MB each, two translations) and restores `sys.argv`."""

    @lru_cache(maxsize=64)
    def translate_once(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
        before = sys.argv
        try:
            return translate(domain, problem, verbose=verbose, optimize=optimize)
        finally:
            sys.argv = before

    return translate_once
