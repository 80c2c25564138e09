"""ALFWorld's engine, TextWorld's planner, made ten times as fast, and the process that it runs in (`engine_process`)."""

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache, wraps
from typing import Any, BinaryIO

import fast_downward
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs.pddl import PddlEnv, textgen
from textworld.logic import Rule

from dreamgym_lg.child_process import Pipes
from dreamgym_lg.errors import EnvironmentFailed
from dreamgym_lg.integrations.alfworld.engine_process import GameState


class Engine:
    """One copy of the planner's library, and the game in it."""

    def __init__(self) -> None:
        self._game = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))

    def start(self, game: Mapping[str, Any]) -> GameState:
        self._game.load(game)
        return _state(self._game.reset())

    def step(self, action: str) -> GameState:
        return _state(self._game.step(action)[0])


def _state(state: Mapping[str, Any]) -> GameState:
    return GameState(str(state["feedback"]), bool(state["won"]), list(state["admissible_commands"]))


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """The child: plays what `engine_process` sends, until that is gone.

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
    """Make TextWorld's PDDL engine ten times as fast; not an observation changes.

    Stock, it parses its grammar anew for every sentence and copies each object that it mentions, and translates a game
    four times to load it. It also leaves its own words in `sys.argv`, which is put right here.
    """
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
    """What the engine changes in a copy are these two mappings, never what they hold."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def _translated_once(translate: Callable[..., Any]) -> Callable[..., Any]:
    """`pddl2sas` that remembers 32 games (3 MB each), each translated in two ways, and leaves `sys.argv` alone."""

    @lru_cache(maxsize=64)
    def translate_once(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
        before = sys.argv
        try:
            return translate(domain, problem, verbose=verbose, optimize=optimize)
        finally:
            sys.argv = before

    return translate_once
