"""ALFWorld (Shridhar et al., 2021) as an `Environment`: household tasks in text, played by TextWorld's PDDL engine."""

import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, lru_cache, wraps
from typing import Any

from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed, MissingDependency
from dreamgym_lg.integrations.alfworld import data
from dreamgym_lg.integrations.alfworld.text import Check, check_action, without_frame
from dreamgym_lg.integrations.text_games.environment import TextGame
from dreamgym_lg.integrations.text_games.text import one_line
from dreamgym_lg.types import StepResult, Task

try:
    import fast_downward
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs.pddl import PddlEnv, textgen
    from textworld.logic import Rule
except ImportError as error:
    raise MissingDependency.extra("alfworld", "alfworld") from error


class _Engine:
    """One copy of the planner's library, and the game in it."""

    def __init__(self) -> None:
        self._game = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
        self._state: Mapping[str, Any] = {}

    def start(self, game: Mapping[str, Any]) -> str:
        self._game.load(game)
        self._state = self._game.reset()
        return str(self._state["feedback"])

    def step(self, action: str) -> str:
        self._state = self._game.step(action)[0]
        return str(self._state["feedback"])

    @property
    def won(self) -> bool:
        return bool(self._state["won"])

    @property
    def admissible(self) -> list[str]:
        return list(self._state["admissible_commands"])


_IDLE: list[_Engine] = []
"""Closed environments leave their engine here: its library marks itself as never to be unloaded, so each costs for ever."""
_LOADING = threading.Lock()
"""Held while a game is loaded: the translator and its parsers keep their state in globals, `sys.stdout` among them."""
_PARSING = threading.RLock()


class ALFWorld(TextGame):
    """One episode at a time of any task of `data.load_tasks`; instances may live in different threads.

    Args:
        max_steps: An episode is truncated after so many steps (the paper's 50); at least 1.
        check: How much `check_action` knows, see `text.check_action`.

    Reward 1 on success, which ends the episode, else 0.
    The first observation is the room alone: the task stands in the instruction. `info["valid"]` says whether the game
    knew the action here and now; it answers both what is impossible and what it does not understand with
    `NOTHING_HAPPENS`, and neither changes anything.

    Each instance in use holds an engine of its own, which `close` gives back for the next one. While a game is loaded
    (a second, the same again a tenth), what other threads print is lost, and other instances wait with their `reset`.
    """

    def __init__(self, *, max_steps: int = 50, check: Check = "names") -> None:
        if max_steps < 1:
            raise ConfigurationError(f"max_steps={max_steps}; allowed: 1 or more")
        self.max_steps, self.check = max_steps, check
        self._engine: _Engine | None = None
        self._steps = 0
        self._over = True

    def reset(self, task: Task) -> str:
        """Raises `ConfigurationError` for a task that is not one of `load_tasks`, `EnvironmentFailed` if the engine breaks."""
        game = data.game_data(task)
        self._over = True
        with _LOADING:
            speed_up()
            engine, self._engine = self._engine, None  # see `step`
            try:
                engine = engine or (_IDLE.pop() if _IDLE else _Engine())
                first = engine.start(game)
            except (Exception, SystemExit) as error:  # the translator ends the process over what it cannot read
                raise EnvironmentFailed(f"ALFWorld cannot build {task.id}: {error!r}") from error
        self._engine = engine
        self._steps, self._over = 0, False
        return without_frame(first)

    def step(self, action: str) -> StepResult:
        if self._over or self._engine is None:
            raise RuntimeError("step called before reset or after the end of the episode")
        # Out of reach of `close` meanwhile: a cancelled episode leaves its thread behind in the engine. And should the
        # engine fail now, the episode has ended and the engine is not used again.
        engine, self._engine, self._over = self._engine, None, True
        action = action.strip()
        valid = action in engine.admissible
        try:
            observation = one_line(engine.step(action))
        except Exception as error:
            raise EnvironmentFailed(f"ALFWorld failed in {action!r}: {error!r}") from error
        self._engine = engine
        self._steps += 1
        success = engine.won
        truncated = not success and self._steps >= self.max_steps
        self._over = success or truncated
        return StepResult(observation, float(success), success, truncated, {"success": success, "valid": valid})

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return check_action(action, observations, check=self.check)

    def valid_actions(self) -> list[str]:
        return self._engine.admissible if self._engine is not None else []

    def close(self) -> None:
        engine, self._engine, self._over = self._engine, None, True
        if engine is not None:
            _IDLE.append(engine)


# --- Speed -----------------------------------------------------------------------------------------------------------


@cache  # once a process
def speed_up() -> None:
    """Make TextWorld's PDDL engine ten times as fast; not an observation changes. `ALFWorld` calls it.

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
    Rule.parse_conjunctive_query = staticmethod(_once(query))
    textgen.copy_context = wraps(copies)(_copy_context)
    fast_downward.pddl2sas = _translated_once(translate)


def _once(parse: Callable[..., Any]) -> Callable[..., Any]:
    """`parse`, each text once and one at a time: the parsers are shared by all threads."""
    remembered = lru_cache(maxsize=4096)(parse)

    def parse_once(*args: Any, **kwargs: Any) -> Any:
        with _PARSING:
            return remembered(*args, **kwargs)

    return parse_once


def _parsed_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    remembered = _once(parse)
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
