"""Rejection sampling: successes that training finds are imitated together with the recorded ones."""

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.evaluation import START
from dreamgym_lg.experiment.imitation import imitate, recorded_successes, start_weights, tokenized
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.workspace import TRAIN, Workspace
from dreamgym_lg.learner import Groups
from dreamgym_lg.types import Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

_MOST = 2
"""Different successes of a task that are imitated, so that easy tasks do not crowd out the others."""
_DONE = "stage/train/rft"
"""Record of finished updates, the folder of the weights, the imitated successes, and the last metrics."""
_METRICS = ("skipped", "new_successes", "solved_tasks")


class RejectionLearner:
    """Imitates recorded successes and the training's, each time from the start weights.

    This is ReST-EM (Singh et al. 2023) with recorded episodes beside the policy's own. The training plays the tasks that have
    no recorded success (`gate.trainable_tasks`). An update without another success than before leaves the weights as they are.

    Args: `policy`, a baseline of this folder, whose weights are replaced; `path`, not used.

    Raises `ConfigurationError` where `train_base` did not train here, or with another `lora`.
    """

    def __init__(self, work: Workspace, policy: "LocalChatModel", path: Path, settings: Settings) -> None:
        from dreamgym_lg.integrations.transformers.adapter_files import loaded_adapters
        from dreamgym_lg.integrations.trl.adapters import wants_adapters

        if not work.record(START):
            raise ConfigurationError(f"learner='rft' imitates as train_base() does: call it first in {work.out}")
        if policy.model is None or wants_adapters(policy.model, settings.lora) != (loaded_adapters(policy.model) is not None):
            raise ConfigurationError(f"lora={settings.lora}: learner='rft' needs the value that train_base() had")
        self._work, self._policy = work, policy
        if name := work.record(_DONE).get("folder"):
            self._load(name)

    @property
    def iteration(self) -> int:
        """Number of finished updates."""
        return int(self._work.record(_DONE).get("finished", 0))

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last update: `new_successes`, imitated beside the recorded ones; `solved_tasks`; `skipped`."""
        done = self._work.record(_DONE)
        return {name: done[name] for name in _METRICS if name in done}

    def update(self, groups: Groups) -> Mapping[str, float]:
        """Imitate the successes of all iterations so far. The buffer has them, `groups` too."""
        work, done, iteration = self._work, self._work.record(_DONE), self.iteration
        played = work.replay_buffer.trajectories(run=work.run_name(TRAIN), errors=False)
        start, chosen = start_weights(work), new_successes(each for each in played if each.iteration <= iteration)
        new = [replace(each, segments=()) for each in tokenized(work, chosen, start)] if chosen else []
        digest = sha256(repr(sorted((each.task.id, _actions(each)) for each in new)).encode()).hexdigest()
        folder, skipped = done.get("folder"), not new or digest == done.get("digest")
        solved = len({each.task.id for each in new})
        same = "; none is new, and the weights stay" if skipped else ""
        work.say(f"{len(new)} episodes beside the recorded ones, of {solved} tasks without a recorded success{same}")
        if not skipped:
            imitate(work, folder := f"rft{iteration}", [*recorded_successes(work), *new], start)
            self._load(folder)
        figures = {"finished": iteration + 1, "folder": folder, "digest": digest}
        work.keep_record(_DONE, {**figures, "skipped": int(skipped), "new_successes": len(new), "solved_tasks": solved})
        if not skipped and (before := done.get("folder")):
            shutil.rmtree(work.models / before, ignore_errors=True)
        return self.metrics

    def _load(self, folder: str) -> None:
        """Put an imitation's weights in the place of the policy's."""
        from dreamgym_lg.integrations.transformers.loading import load_model

        assert self._policy.model is not None  # as `__init__` makes sure
        self._policy.model.load_state_dict(load_model(self._work.models / folder, device="cpu").state_dict())


def _actions(episode: Trajectory) -> tuple[str, ...]:
    return tuple(step.action for step in episode.steps)


def new_successes(played: Iterable[Trajectory]) -> list[Trajectory]:
    """The shortest different successes of each task, `_MOST` at most, without an invalid action."""
    by_task = defaultdict[str, dict[tuple[str, ...], Trajectory]](dict)
    for each in sorted(played, key=lambda each: len(each.steps)):
        if each.success and not each.invalid_actions:
            by_task[each.task.id].setdefault(_actions(each), each)
    return [each for successes in by_task.values() for each in islice(successes.values(), _MOST)]
