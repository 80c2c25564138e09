"""Tasks of MiniWoB++, WebArena and WebArena-Lite, without a browser and without the network."""

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.integrations.text_games.game import split_of
from dreamgym_lg.types import Task

Benchmark = Literal["miniwob", "webarena", "webarenalite"]
"""125 tasks of any number of seeds, 812, and 165."""
SITES = ("WA_SHOPPING", "WA_SHOPPING_ADMIN", "WA_REDDIT", "WA_GITLAB", "WA_WIKIPEDIA", "WA_MAP", "WA_HOMEPAGE")
"""Environment variables with the addresses of WebArena's sites, which the user runs from docker images."""

_FILES = {"webarena": ("webarena", "test.raw.json"), "webarenalite": ("browsergym.webarenalite", "test_webarena_lite.raw.json")}
_INSTALL = "pip install --no-deps browsergym-webarena browsergym-webarenalite libwebarena text-generation"


def load_tasks(benchmark: Benchmark, *, names: Iterable[str] | None = None, seeds: Iterable[int] = range(1)) -> list[Task]:
    """The tasks of a benchmark, in its own order.

    `metadata["task"]` and `seed` are BrowserGym's. Tasks of MiniWoB++ are split by a hash of name and seed (15 % test, 10 %
    validation); their instruction is what all seeds have in common, and `make_tasks` asks the page for its own. Tasks of
    WebArena are split by a hash of their template, so that no template is in two splits; tasks of WebArena-Lite are all test
    tasks, and `metadata["webarena_id"]` names the task of WebArena that each is made from. No answer is part of a task.

    Args:
        names: Of MiniWoB++: the tasks, such as `login-user`. Default: all.
        seeds: Of MiniWoB++: each task is loaded with each of them.

    Raises `ConfigurationError` for what is unknown, `MissingDependency` where the benchmark's package is not installed.
    """
    if benchmark not in get_args(Benchmark):
        raise ConfigurationError.unknown("benchmark", benchmark, get_args(Benchmark))
    return list(_miniwob(names, list(seeds)) if benchmark == "miniwob" else _webarena(benchmark))


def check_sites(environment: Mapping[str, str]) -> None:
    """Raises `ConfigurationError` naming each address of `SITES` that `environment` (`os.environ`) lacks."""
    if missing := [name for name in SITES if not environment.get(name)]:
        raise ConfigurationError(
            f"WebArena's sites are yours to run (https://github.com/web-arena-x/webarena, docker images), and "
            f"{len(missing)} of {len(SITES)} addresses are missing: set {', '.join(missing)}"
        )


def _miniwob(names: Iterable[str] | None, seeds: Sequence[int]) -> Iterator[Task]:
    try:
        known = {task.subdomain: task for task in import_module("browsergym.miniwob").ALL_MINIWOB_TASKS}
    except ImportError as error:
        raise MissingDependency.extra("browsergym-miniwob", "browsergym") from error
    for name in known if names is None else names:
        if name not in known:
            raise ConfigurationError.unknown("task of MiniWoB++", name, known)
        for seed in seeds:
            yield Task(
                id=f"miniwob.{name}-{seed}",
                instruction=known[name].desc,
                environment="miniwob",
                seed=seed,
                metadata={"task": f"miniwob.{name}"},
                split=split_of("miniwob", name, str(seed)),
            )


def _webarena(benchmark: str) -> Iterator[Task]:
    lite = benchmark == "webarenalite"
    for row in json.loads(_installed(benchmark).read_text(encoding="utf-8")):
        number = row["old_task_id"] if lite else row["task_id"]  # what BrowserGym calls it by
        metadata = {
            "task": f"{benchmark}.{number}",
            "sites": row["sites"],
            "start_url": row["start_url"],
            "template": row["intent_template_id"],
        }
        yield Task(
            id=f"{benchmark}.{number}",
            instruction=row["intent"],
            environment=benchmark,
            seed=0,
            metadata=metadata | {"webarena_id": number} if lite else metadata,
            split="test" if lite else split_of("webarena", str(row["intent_template_id"])),
        )


def _installed(benchmark: str) -> Path:
    """The file in the benchmark's package. That is not imported: it would look for the sites."""
    package, name = _FILES[benchmark]
    try:
        spec = importlib.util.find_spec(package)
    except ImportError:
        spec = None
    # `browsergym.webarenalite` has an __init__, `webarena` is a folder without one
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    file = next((Path(folder) / name for folder in folders if (Path(folder) / name).exists()), None)
    if file is None:
        raise MissingDependency(f"{benchmark}'s tasks are not installed; run: {_INSTALL}")
    return file
