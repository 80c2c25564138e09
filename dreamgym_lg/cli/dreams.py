"""The dream of a command: an experiment's newest one, or one over a replay buffer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dreamgym_lg.cli.experiment import open_experiment
from dreamgym_lg.dream import Dream, usual_dream
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.experience_models import load_experience_model
from dreamgym_lg.experiment.experiment import Experiment
from dreamgym_lg.hosted.chat_model import EXAMPLE_MODEL
from dreamgym_lg.replay.buffer import ReplayBuffer

MODEL_HELP = (
    f"With --replay-buffer: the experience model, e.g. {EXAMPLE_MODEL}, or the folder of a local one, "
    "e.g. runs/mine/models/experience-0."
)
ModelName = Annotated[str | None, typer.Option("--experience-model", help=MODEL_HELP)]


class Source(NamedTuple):
    """A replay buffer and its dream, of an experiment or of the buffer alone."""

    buffer: ReplayBuffer
    work: Experiment | None = None
    model: str = ""
    """Without an experiment: the experience model's name."""

    def dream(self) -> Dream:
        """Raises `ConfigurationError` where an experiment has no experience model yet."""
        if self.work is None:
            return usual_dream(load_experience_model(self.model, self.buffer))
        if not self.work.can_dream:
            again = "run `dreamgym train` with the same options first"
            raise ConfigurationError(f"{self.work.out} holds no experience model yet: {again}")
        return self.work.dream(own_process=False)


@contextmanager
def opened(world: str | None, file: Path | None, model: str | None, loaded: object = None) -> Iterator[Source]:
    """The source of a dream. Raises `ConfigurationError` unless there is either a world, or a buffer with a model."""
    if world is not None and file is None:
        if model:
            raise ConfigurationError(f"{world} has an experience model of its own: leave --experience-model away")
        work = open_experiment(world, loaded=loaded, existing=True)
        with work.replay_buffer as buffer:
            yield Source(buffer, work)
        return
    if world is not None or file is None:
        raise ConfigurationError("give either a WORLD, or --replay-buffer with --experience-model")
    if not model:
        raise ConfigurationError(
            f"--replay-buffer needs --experience-model, e.g. {EXAMPLE_MODEL} or runs/mine/models/experience-0"
        )
    if not file.exists():
        raise ConfigurationError(f"the replay buffer {file} does not exist: `dreamgym import` makes one of your traces")
    with ReplayBuffer(file) as buffer:
        yield Source(buffer, model=model)
