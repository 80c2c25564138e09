"""The graphs as `langgraph dev` serves them, on the parts of a finished or unfinished run.

The folder is named by the environment variable DREAMGYM_OUT (an output folder of `dreamgym demo` or `dreamgym train`). The
server brings its own checkpointer, so the graphs are compiled bare.
"""

import asyncio
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experiment.experiment import Demo
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.graphs.training import create_training_graph


def _run() -> Demo:
    out = Path(os.environ.get("DREAMGYM_OUT", "runs/peckingorder-seed1"))
    if not (out / "settings.json").exists():
        raise ConfigurationError(f"DREAMGYM_OUT={out} is no output folder; run `dreamgym train --out {out}` first")
    return Demo(out, Settings(**json.loads((out / "settings.json").read_text())))


class _Dream(DreamEnvironment):
    """Steps in a thread: the server refuses whatever blocks its loop, and retrieval reads SQLite."""

    astep = Environment.astep


@cache
def _episode() -> Any:
    run = _run()
    name = "trained" if (run.models / "trained").exists() else "base"
    world = _Dream(run.experience(own_process=False), check_action=run.check_action, rewards="score")
    return create_episode_graph(run.policy(name), world, max_steps=run.settings.max_steps).compile()


@cache
def _training() -> Any:
    training, _ = _run().training()
    return create_training_graph(training).compile()


async def episode() -> Any:
    """The newest policy in the dream. Input: `{"task": ...}`, a task as a JSON object with the fields of `Task`.

    One world, so one episode at a time. The server asks for the graph at each run, and allows its loop no loading of models.
    """
    return await asyncio.to_thread(_episode)


async def training() -> Any:
    """The training graph. Input: `{"run": "studio", "iterations": 2}`."""
    return await asyncio.to_thread(_training)
