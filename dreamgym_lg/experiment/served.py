"""The graphs as `langgraph dev` serves them, on the parts of a finished or unfinished experiment.

The folder is named by the environment variable DREAMGYM_OUT (an output folder of `dreamgym demo` or `dreamgym train`). The
server brings its own checkpointer, so the graphs are compiled bare.
"""

import asyncio
import os
from functools import cache
from pathlib import Path
from typing import Any

from dreamgym_lg.environment import Environment
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.training import create_training
from dreamgym_lg.experiment.worlds import open_folder
from dreamgym_lg.graphs.episode import create_episode_graph
from dreamgym_lg.graphs.training import create_training_graph
from dreamgym_lg.learner import Learner
from dreamgym_lg.token_recorder import TrainablePolicy
from dreamgym_lg.types import StepResult, Task


def _experiment() -> Experiment:
    return open_folder(Path(os.environ.get("DREAMGYM_OUT", "runs/peckingorder-seed1")))


class _InThread(Environment):
    """An environment whose steps run in a thread: the server refuses whatever blocks its loop, and retrieval reads SQLite."""

    def __init__(self, inner: Environment) -> None:
        self.inner = inner

    def reset(self, task: Task) -> str:
        return self.inner.reset(task)

    def step(self, action: str) -> StepResult:
        return self.inner.step(action)


@cache
def _episode() -> Any:
    work = _experiment()
    name = "trained" if (work.models / "trained").exists() else "base"
    dream = _InThread(work.dream(own_process=False).create_environment())
    return create_episode_graph(work.policy(name), dream, max_steps=work.world.max_steps).compile()


@cache
def _training() -> Any:
    work = _experiment()

    def beside(policy: TrainablePolicy, path: Path, settings: Settings) -> Learner:
        """A learner of its own: the checkpoints of the experiment's training stay as they are."""
        return work.create_learner(policy, path.with_name("studio"), settings)

    training, _ = create_training(work, work.base_policy(), beside)
    training.evaluate = training.refresh = None
    return create_training_graph(training).compile()


async def episode() -> Any:
    """The newest policy in the dream. Input: `{"task": ...}`, a task as a JSON object with the fields of `Task`.

    One world, so one episode at a time. The server asks for the graph at each run, and allows its loop no loading of models.
    """
    return await asyncio.to_thread(_episode)


async def training() -> Any:
    """The training graph. Input: `{"run": "studio", "iterations": 2}`."""
    return await asyncio.to_thread(_training)
