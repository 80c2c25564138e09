"""The graphs as `langgraph dev` serves them, on the parts of a finished or unfinished run.

The folder is named by the environment variable DREAMGYM_OUT (an output folder of `dreamgym demo` or `dreamgym train`). The
server brings its own checkpointer, so the graphs are compiled bare.
"""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dreamgym_lg.demo import Demo
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.graphs.training import create_training_graph
from dreamgym_lg.recipe import Settings


def _run() -> Demo:
    out = Path(os.environ.get("DREAMGYM_OUT", "runs/peckingorder-seed0"))
    if not (out / "settings.json").exists():
        raise ConfigurationError(f"DREAMGYM_OUT={out} is no output folder; run `dreamgym train --out {out}` first")
    return Demo(out, Settings(**json.loads((out / "settings.json").read_text())))


def episode() -> Any:
    """The newest policy in the dream. Input: `{"task": ...}`, a task as a JSON object with the fields of `Task`."""
    run = _run()
    name = "trained" if (run.models / "trained").exists() else "base"
    lent: AbstractContextManager[Environment] = run.dream(run.experience())
    return create_episode_graph(run.policy(name), lent.__enter__(), max_steps=run.settings.max_steps).compile()


def training() -> Any:
    """The training graph. Input: `{"run": "studio", "iterations": 2}`."""
    training, _ = _run().training()
    return create_training_graph(training).compile()
