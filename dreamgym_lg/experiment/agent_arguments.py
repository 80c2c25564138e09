"""The arguments of `AgentWorld`: their checks, their defaults, and their names for the run's settings."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.curriculum.task_generator import ChatTaskGenerator, TaskGenerator
from dreamgym_lg.dream import Dream, User
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.workspace import logger
from dreamgym_lg.hosted import load_chat_model
from dreamgym_lg.simulate import Allow
from dreamgym_lg.simulate.agent import Verify
from dreamgym_lg.simulate.episode import EpisodeOptions
from dreamgym_lg.simulate.wall.wall import GUARD_LIMITS, Isolation, limits_of_wall, missing_for_wall
from dreamgym_lg.types import Task

_OPTIONS = set(EpisodeOptions.__annotations__)


def argument_names(functions: Mapping[str, Any], dream: Dream | None, relative_judge: bool) -> dict[str, object]:
    """The names, for the folder's settings, of functions and parts that decide a dreamed episode."""
    names: dict[str, object] = {
        key: getattr(getattr(function, "func", function), "__name__", type(function).__name__)
        for key, function in functions.items()
        if function is not None
    }
    if dream is not None:
        names["dream"] = [part.name for part in (*dream.responders, dream.user, *dream.judges) if part is not None]
    if relative_judge:
        names["relative_judge"] = True
    return names


def resolve_isolation(isolation: str | None, graph: object) -> Isolation:
    if isolation not in (None, "process", "guard"):
        raise ConfigurationError(f"isolation={isolation!r}: give 'process' or 'guard'")
    if isolation == "process" and not isinstance(graph, str):
        raise ConfigurationError(
            f"isolation='process' of a {type(graph).__name__}, which cannot leave this process: give where it is written, "
            "'FILE.py:NAME' or 'package.module:NAME'"
        )
    if isolation == "process":
        return "process"
    if isolation is None and isinstance(graph, str):
        if not (missing := missing_for_wall()):
            for limit in limits_of_wall():
                logger.warning("the wall on this machine: %s", limit)
            return "process"
        logger.warning("no wall here, which needs %s: dreams are played under the guard", "; and ".join(missing))
    _warn_of_guard()
    return "guard"


@cache
def _warn_of_guard() -> None:
    """Warn once per process."""
    logger.warning("isolation='guard' %s; an agent given as 'FILE.py:NAME' is played behind a wall of the kernel", GUARD_LIMITS)


def check_arguments(
    tasks: Sequence[Task],
    writes: Collection[str] | None,
    functions: Mapping[str, object],
    options: Mapping[str, Any],
    *,
    names: Collection[str],
) -> None:
    """Raise `ConfigurationError` for unknown options and arguments of a wrong kind. Args: `names`, of known arguments."""
    for name in sorted(set(options) - _OPTIONS):
        raise ConfigurationError.unknown("option of DreamGym", name, {*_OPTIONS, *names})
    for name, value in {"writes": writes, **options}.items():
        if name in ("writes", "pass_through", "simulate_nodes", "route") and isinstance(value, str):
            raise ConfigurationError(f"{name}={value!r}: give a list of names")
    if not isinstance(options.get("allow"), Allow | None):
        raise ConfigurationError(f"allow={options['allow']!r}: give dreamgym_lg.simulate.Allow(paths=[...], hosts=[...])")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigurationError(f"{name}={function!r} is no function; AgentWorld's docstring says what it is given")
    check_tasks(tasks)


def check_dream(dream: Dream | None, user: User | None, verify_dream: Verify | None) -> None:
    """Raise `ConfigurationError` for a `user` beside a dream. And for a dream with a user and no judge."""
    if dream is None:
        return
    if user is not None:
        raise ConfigurationError("user= would never talk, as dream= brings its own: give it to the Dream, Dream(..., user=)")
    if dream.user is not None and not dream.judges and verify_dream is None:
        raise ConfigurationError("dream= has a user and no judge: add judges=, or give verify_dream=")


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raise `ConfigurationError` unless each is a `Task` with an id of its own."""
    for task in tasks:
        if not isinstance(task, Task):
            raise ConfigurationError(f"tasks holds {task!r}; each has to be a Task, such as those of DreamGym.tasks('test')")
    if duplicates := [id for id, number in Counter(task.id for task in tasks).items() if number > 1]:
        raise ConfigurationError(
            f"tasks= has {len(duplicates)} ids more than once, such as {duplicates[0]!r}: give each task once"
        )


def to_task_generator(generator: object) -> TaskGenerator | None:
    model = load_chat_model(generator) if isinstance(generator, str) else generator
    if isinstance(model, BaseChatModel):
        return ChatTaskGenerator(model)
    if model is None or callable(model):
        return model
    raise ConfigurationError(f"task_generator={generator!r}: give a chat model or its name, a TaskGenerator, or None")
