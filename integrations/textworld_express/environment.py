"""TextWorld-Express as an `Environment`: one Java process serves all concurrent episodes."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.game import TextGame, digest, one_line, split_of
from dreamgym_lg.integrations.textworld_express.java import Interface
from dreamgym_lg.integrations.textworld_express.text import GAMES, UNKNOWN_ACTION, check_action
from dreamgym_lg.types import StepResult, Task

Answer = TypeVar("Answer")

_IDLE: list[Interface] = []
"""Game slots of closed environments, for the next ones. Making a slot and loading a game into it takes time."""


def _world(task: Task) -> dict[str, Any]:
    """The task's world; raises `ConfigurationError` naming the key that is missing or wrong."""
    if task.origin == "synthetic":
        raise ConfigurationError(f"task {task.id} is synthetic: no real world belongs to it; play it in the dream")
    missing = [key for key in ("game", "params", "fold") if key not in task.metadata]
    if missing:
        raise ConfigurationError(f"task {task.id} lacks metadata[{missing[0]!r}], which TextWorld-Express needs")
    world = {"seed": task.seed} | {key: task.metadata[key] for key in ("game", "params", "fold")}
    if world["game"] not in GAMES:
        raise ConfigurationError.unknown("game", str(world["game"]), GAMES)
    if world["fold"] not in ("train", "dev", "test"):
        raise ConfigurationError.unknown("fold", str(world["fold"]), ("train", "dev", "test"))
    if task.seed is None or not -(2**31) <= task.seed < 2**31:
        raise ConfigurationError(f"task {task.id} has seed {task.seed}; allowed: a 32-bit integer")
    return world


class TextWorldExpress(TextGame):
    """One episode at a time of any of `GAMES`. Instances may live in different threads and share one Java process.

    Each holds a slot of that process from its first `reset` to its `close`. A task's `seed` and metadata name the world:
    `game`, `params` and `fold` (train, dev or test, which share no objects).

    Args: `max_steps`, real steps after which an episode is truncated; at least 1.
    """

    def __init__(self, *, max_steps: int = 10) -> None:
        super().__init__(max_steps)
        self._slot: Interface | None = None
        self._game = ""
        self._state: dict[str, Any] = {}

    def reset(self, task: Task) -> str:
        """Raises `ConfigurationError` for metadata that names no world, `EnvironmentFailed` if Java breaks."""
        world, self._seen = _world(task), ()
        self._state = self._ask(lambda slot: slot.start(world))
        self._game = world["game"]
        return self.begin(one_line(self._state["observation"]))

    def play(self, action: str) -> StepResult:
        """The reward is the change of the game's score; a failure earns 0.

        (The game itself scores a failure -1 whatever came before, from which a weak policy learns to do nothing.)
        """
        before = self._state["score"]
        # A lone surrogate cannot be sent to Java; no valid action holds one, so any replacement is answered alike.
        sent = action.strip().encode("utf-8", "replace").decode()
        self._state = json.loads(self._ask(lambda slot: slot.call("stepJSON", sent)))
        success, failure = self._state["tasksuccess"], self._state["taskfailure"]
        observation = one_line(self._state["observation"])
        reward = 0.0 if failure else float(self._state["score"] - before)
        info = {"success": success, "valid": observation != UNKNOWN_ACTION}
        return StepResult(observation, reward, success or failure, False, info)

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return check_action(self._game, action, observations)

    def valid_actions(self) -> list[str]:
        return sorted(set(self._state.get("validActions", ())))

    def instruction(self) -> str:
        """The instruction of the last reset's game."""
        return one_line(self._ask(lambda slot: slot.call("getTaskDescription")))

    def gold_path(self, task: Task) -> list[str]:
        """The game's own solution of `task`, without its needless first `look around`. Ends a running episode.

        Through several rooms the game finds another one each time.
        """
        self._seen = ()
        self._state = self._ask(lambda slot: slot.start(_world(task), gold=True))
        path = [str(action) for action in self._ask(lambda slot: slot.call("getGoldActionSequence"))]
        return path[1:] if path[:1] == ["look around"] else path

    def close(self) -> None:
        slot, self._slot, self._seen = self._slot, None, ()
        if slot is not None:
            _IDLE.append(slot)

    def _ask(self, question: Callable[[Interface], Answer]) -> Answer:
        """The answer of this instance's slot, which is out of reach of `close` meanwhile.

        A cancelled episode leaves its thread behind in the game, and the next one must not get that slot.
        """
        slot, self._slot = self._slot or _idle_slot(), None
        answer = question(slot)
        self._slot = slot
        return answer


def _idle_slot() -> Interface:
    with suppress(IndexError):  # a look before would race with other threads
        return _IDLE.pop()
    return Interface()


def make_tasks(
    game: str, seeds: Iterable[int], *, environment: TextWorldExpress, fold: str = "train", params: str | None = None
) -> list[Task]:
    """One task per different first observation among `seeds`; each seed is reset once.

    Fold `train` is split by `split_of`, `dev` is validation, `test` is test: their objects are others.
    """
    if game not in GAMES:
        raise ConfigurationError.unknown("game", game, GAMES)
    params = GAMES[game] if params is None else params
    tasks: dict[str, Task] = {}
    world = {"game": game, "params": params, "fold": fold}
    for seed in seeds:
        probe = Task(id="probe", instruction="", environment=f"textworld_express/{game}", seed=seed, metadata=world)
        observation = environment.reset(probe)
        if observation in tasks:
            continue
        tasks[observation] = Task(
            id=f"{game}-{digest(game, params, observation)[:12]}",
            instruction=environment.instruction(),
            environment=probe.environment,
            observation=observation,
            seed=seed,
            metadata=world,
            split=split_of(observation) if fold == "train" else "validation" if fold == "dev" else "test",
        )
    return list(tasks.values())
