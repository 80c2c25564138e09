"""Worlds by name: found by the entry-point group `dreamgym_lg.worlds`, so that other packages can add theirs."""

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World

GROUP = "dreamgym_lg.worlds"
"""Each entry point creates a `World` when called without arguments, or again with its `World.arguments`; the last part of the
world's name is its own."""


def world_names() -> list[str]:
    """The names of all installed worlds."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_world(name: str, **arguments: object) -> World:
    """Create the world of this name. Raises `ConfigurationError` for an unknown one."""
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points:
        unknown = ConfigurationError.unknown("world", name, world_names())
        raise ConfigurationError(f"{unknown} There is no folder of that name either.")
    world = points[0].load()(**arguments)
    if not isinstance(world, World):
        raise ConfigurationError(f"the entry point {name!r} of {GROUP} created {world!r}; it has to be a World")
    return world


def open_folder(folder: Path, world: World | None = None, **settings: Any) -> Experiment:
    """The experiment whose stages are in `folder`, with the settings that are stored there.

    Args: `world`, default: the installed one whose name is stored in the folder; `settings`, values to change.

    Raises `ConfigurationError` for a folder of no experiment or of one on another world, and if no installed package has its
    world.
    """
    file, advice = folder / "settings.json", "in place of the folder, give FILE.py:NAME of the Experiment"
    if not folder.exists():
        raise ConfigurationError(f"{ConfigurationError.missing_folder(folder)} `dreamgym train WORLD` makes one")
    if not file.exists():
        raise ConfigurationError(
            f"{str(folder)!r} is no folder of an experiment: it has no settings.json (`dreamgym train WORLD` makes one)"
        )
    if (folder / "run").exists():
        raise ConfigurationError(f"the episodes of {folder} are in a replay buffer elsewhere: {advice}")
    try:
        stored = json.loads(file.read_text())
        name, arguments = str(stored.pop("world")), stored.pop("arguments")
        current = Settings(**{**stored, **settings})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{file} cannot be read, or was written by another version of dreamgym-lg ({type(error).__name__}: {error}): "
            "take another folder"
        ) from error
    if world is None:
        own = name.rpartition("/")[2]
        if own not in world_names():
            raise ConfigurationError(
                f"{folder} holds an experiment on the world {name!r}, which no installed package has; {advice}"
            )
        world = load_world(own, **arguments)
    if world.name != name:
        raise ConfigurationError(f"{folder} holds an experiment on the world {name!r}, not {world.name!r}: take another folder")
    return Experiment(world, folder, current)
