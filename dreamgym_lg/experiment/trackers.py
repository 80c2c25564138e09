"""Trackers of a training run, through accelerate: TensorBoard, Weights & Biases, MLflow and trackio."""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from dreamgym_lg.errors import ConfigurationError, MissingDependency

TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")
"""Names of trackers, which are also the names of their packages."""

PROJECT = "dreamgym-lg"
"""Project of the runs; the environment may name another: `WANDB_PROJECT`, `MLFLOW_EXPERIMENT_NAME`."""


def check_trackers(report_to: str | Sequence[str]) -> tuple[str, ...]:
    """The named trackers without repetition; none for `"none"`.

    Raises `ConfigurationError` for an unknown name, `MissingDependency` where the tracker's package is not installed.
    """
    names = tuple(dict.fromkeys([report_to] if isinstance(report_to, str) else report_to))
    if names == ("none",):
        return ()
    for name in names:
        if name not in TRACKERS:
            raise ConfigurationError.unknown("tracker in report_to=", str(name), [*TRACKERS, "none"])
        if find_spec(name) is None:
            raise MissingDependency(f"report_to={name!r} needs the package {name}; run: pip install {name}")
    return names


class ExperimentTrackers:
    """Sends each iteration's metrics to trackers. A resumed training continues its run there, except in MLflow.

    Args:
        names: Some of `TRACKERS`.
        folder: The experiment's folder, for TensorBoard's event files and the name of the run (`tracker-run`).
        config: The run's configuration; only its numbers, texts and truth values are sent.
    """

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> None:
        self._names, self._folder = names, folder
        self._config = {key: value for key, value in config.items() if isinstance(value, int | float | str)}
        self._started: list[Any] | None = None

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics at the step `iteration`; the first call starts the trackers."""
        if self._started is None:
            self._started = self._start(iteration) if self._names else []
        for tracker in self._started:
            tracker.log(dict(metrics), step=iteration)

    def close(self) -> None:
        for tracker in self._started or ():
            tracker.finish()
        self._started = None

    def _start(self, iteration: int) -> list[Any]:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # the trackers ask it for the main process
        resumed = (self._folder / "tensorboard").exists()  # TensorBoard would show the settings a second time
        if not (file := self._folder / "tracker-run").exists():
            file.write_text(f"{self._folder.name}-{uuid4().hex[:8]}")
        run, project = file.read_text(), os.environ.get("WANDB_PROJECT", PROJECT)
        arguments: dict[str, dict[str, Any]] = {
            "tensorboard": {"run_name": "tensorboard", "logging_dir": self._folder, "purge_step": iteration},
            "wandb": {"run_name": project, "id": run, "name": run, "resume": "allow", "dir": str(self._folder)},
            "trackio": {"run_name": PROJECT, "name": run, "resume": "allow"},
            "mlflow": {"experiment_name": PROJECT, "run_name": run},
        }
        started = {name: LOGGER_TYPE_TO_CLASS[name](**arguments[name]) for name in self._names}
        for name, tracker in started.items():
            tracker.start()
            if name != "tensorboard" or not resumed:
                tracker.store_init_configuration(self._config)
        return list(started.values())
