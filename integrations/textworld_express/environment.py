"""TextWorld-Express as an `Environment`: one Java process serves all concurrent episodes."""

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.textworld_express.java import Interface
from dreamgym_lg.integrations.textworld_express.text import (
    GAMES,
    UNKNOWN_ACTION,
    Check,
    check_action,
    digest,
    one_line,
    world_split,
)
from dreamgym_lg.types import StepResult, Task


class RealSteps:
    """Counts what was asked of real environments, over all of them and over threads: the cost that reports quote."""

    def __init__(self) -> None:
        self.steps = 0
        self.resets = 0
        self._lock = threading.Lock()

    def add(self, *, steps: int = 0, resets: int = 0) -> None:
        with self._lock:
            self.steps += steps
            self.resets += resets


def _world(task: Task) -> dict[str, Any]:
    """What `task.metadata` says of the world; raises `ConfigurationError` naming the key that is missing or wrong."""
    if task.origin == "synthetic":
        raise ConfigurationError(f"task {task.id} is synthetic: no real world belongs to it; play it in the dream")
    missing = [key for key in ("game", "params", "seed", "fold") if key not in task.metadata]
    if missing:
        raise ConfigurationError(f"task {task.id} lacks metadata[{missing[0]!r}], which TextWorld-Express needs")
    world = {key: task.metadata[key] for key in ("game", "params", "seed", "fold")}
    if world["game"] not in GAMES:
        raise ConfigurationError.unknown("game", str(world["game"]), GAMES)
    if world["fold"] not in ("train", "dev", "test"):
        raise ConfigurationError.unknown("fold", str(world["fold"]), ("train", "dev", "test"))
    if not isinstance(world["seed"], int) or not -(2**31) <= world["seed"] < 2**31:
        raise ConfigurationError(f"task {task.id} has seed {world['seed']!r}; allowed: a 32-bit integer")
    return world


class TextWorldExpress(Environment):
    """One episode at a time of any of `GAMES`; instances share one Java process and may live in different threads.

    A task's metadata names the world: `game`, `params`, `seed` and `fold` (train, dev or test, which share no
    objects). An episode is truncated after `max_steps` real steps.
    """

    def __init__(self, *, max_steps: int = 10, check: Check = "names", counter: RealSteps | None = None) -> None:
        self.max_steps, self.check = max_steps, check
        self.counter = counter or RealSteps()
        self._interface = Interface()
        self._game = ""
        self._state: dict[str, Any] = {}
        self._steps = 0
        self._over = True

    def reset(self, task: Task) -> str:
        """Raises `ConfigurationError` for metadata that names no world, `EnvironmentFailed` if Java breaks."""
        world = _world(task)
        self._over = True
        self._state = self._interface.start(world)
        self.counter.add(resets=1)
        self._game, self._steps, self._over = world["game"], 0, False
        return one_line(self._state["observation"])

    def step(self, action: str) -> StepResult:
        """The reward is the change of the game's score, except that failing the task pays 0 and keeps what was reached.

        (The game itself scores a failure, such as a wrong guess in `peckingorder`, -1 whatever came before. From that a
        weak policy learns to do nothing: any attempt costs more than it can expect to gain.)
        """
        if self._over:
            raise RuntimeError("step called before reset or after the end of the episode")
        self._over, before = True, self._state["score"]  # should Java fail now, the episode has ended
        # A lone surrogate cannot be sent to Java; no valid action holds one, so any replacement is answered alike.
        self._state = json.loads(self._interface.call("stepJSON", action.strip().encode("utf-8", "replace").decode()))
        self._steps += 1
        self.counter.add(steps=1)
        success, failure = self._state["tasksuccess"], self._state["taskfailure"]
        truncated = self._steps >= self.max_steps and not (success or failure)
        self._over = success or failure or truncated
        observation = one_line(self._state["observation"])
        reward = 0.0 if failure else float(self._state["score"] - before)
        info = {"success": success, "valid": observation != UNKNOWN_ACTION}
        return StepResult(observation, reward, success or failure, truncated, info)

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return check_action(self._game, action, observations, check=self.check) if self._game else None

    def valid_actions(self) -> list[str]:
        """What the game accepts now, sorted: for behaviour policies and tests, not for a policy under evaluation."""
        return sorted(set(self._state.get("validActions", ())))

    def instruction(self) -> str:
        """What the game of the last reset asks for."""
        return one_line(self._interface.call("getTaskDescription"))

    def gold_path(self, task: Task) -> list[str]:
        """The game's own solution of `task` without its needless first `look around`; ends a running episode.

        Through several rooms (`coin`, `twc` with `numLocations` above 1) the game finds another one each time.
        """
        self._over = True
        self._state = self._interface.start(_world(task), gold=True)
        path = [str(action) for action in self._interface.call("getGoldActionSequence")]
        return path[1:] if path[:1] == ["look around"] else path

    def close(self) -> None:
        self._interface, self._over = Interface(), True


class TextWorldExpressPool:
    """At most `size` environments at once, all in one Java process; safe to share between threads."""

    def __init__(
        self, size: int = 64, *, max_steps: int = 10, check: Check = "names", counter: RealSteps | None = None
    ) -> None:
        if size < 1:
            raise ConfigurationError(f"size must be at least 1, got {size}")
        self.counter = counter or RealSteps()
        self._max_steps, self._check = max_steps, check
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[Interface] = []
        self._lent: set[TextWorldExpress] = set()
        self._closed = False

    def create(self) -> TextWorldExpress:
        """One whose `close` gives its place back. Waits while `size` are lent; `RuntimeError` on a closed pool."""
        self._free.acquire()
        environment = _Lent(self, max_steps=self._max_steps, check=self._check, counter=self.counter)
        with self._lock:
            if self._closed:
                self._free.release()
                raise RuntimeError("the pool is closed")
            if self._idle:
                environment._interface = self._idle.pop()
            self._lent.add(environment)
        return environment

    acquire = create

    def release(self, environment: TextWorldExpress) -> None:
        """Take an environment back; one that is not lent (any more) is ignored."""
        with self._lock:
            if environment not in self._lent:
                return
            self._lent.remove(environment)
            if not self._closed:
                self._idle.append(environment._interface)
        TextWorldExpress.close(environment)
        self._free.release()

    @contextmanager
    def lend(self) -> Iterator[TextWorldExpress]:
        environment = self.create()
        try:
            yield environment
        finally:
            self.release(environment)

    def close(self) -> None:
        """Lend no more; who waits for a place gets `RuntimeError` once one is free. What is lent stays usable."""
        with self._lock:
            self._closed = True
            self._idle.clear()


class _Lent(TextWorldExpress):
    def __init__(self, pool: TextWorldExpressPool, **options: Any) -> None:
        super().__init__(**options)
        self._pool = pool

    def close(self) -> None:
        self._pool.release(self)


def make_tasks(
    game: str, seeds: Iterable[int], *, environment: TextWorldExpress, fold: str = "train", params: str | None = None
) -> list[Task]:
    """One task per different first observation among `seeds`, in their order. Costs one real reset per seed.

    Fold `train` is split by `world_split`; `dev` is all validation and `test` all test, since their objects are others.
    """
    if game not in GAMES:
        raise ConfigurationError.unknown("game", game, GAMES)
    params = GAMES[game] if params is None else params
    tasks: dict[str, Task] = {}
    for seed in seeds:
        world = {"game": game, "params": params, "seed": seed, "fold": fold}
        probe = Task(id="probe", instruction="", environment=f"textworld_express/{game}", metadata=world)
        observation = environment.reset(probe)
        if observation in tasks:
            continue
        tasks[observation] = Task(
            id=f"{game}-{digest(game, params, observation)[:12]}",
            instruction=environment.instruction(),
            environment=probe.environment,
            metadata={**world, "observation": observation},
            split=world_split(observation) if fold == "train" else "validation" if fold == "dev" else "test",
        )
    return list(tasks.values())
