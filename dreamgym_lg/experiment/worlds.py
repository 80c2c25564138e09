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
"""Each entry point is a function of no argument that creates a `World`; the last part of the world's name is its own."""


def world_names() -> list[str]:
    """The names of all installed worlds."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_world(name: str) -> World:
    """Create the world of this name. Raises `ConfigurationError` for an unknown one."""
    found = [point for point in entry_points(group=GROUP) if point.name == name]
    if not found:
        raise ConfigurationError.unknown("world", name, world_names())
    world = found[0].load()()
    if not isinstance(world, World):
        raise ConfigurationError(f"the entry point {name!r} of {GROUP} created {world!r}; it has to be a World")
    return world


def open_folder(folder: Path, **settings: Any) -> Experiment:
    """The experiment whose stages are in `folder`. Args: `settings`, those to change.

    Raises `ConfigurationError` for another folder, and for one whose world no installed package has.
    """
    file = folder / "settings.json"
    if not file.exists():
        raise ConfigurationError(f"{folder} is no experiment's folder (it has no settings.json); `dreamgym train` makes one")
    stored = json.loads(file.read_text())
    world = load_world(str(stored.pop("world", "")).rpartition("/")[2])
    try:
        return Experiment(world, folder, Settings(**{**stored, **settings}))
    except TypeError as error:
        raise ConfigurationError(f"{file} was written by another version of dreamgym-lg: {error}") from None
