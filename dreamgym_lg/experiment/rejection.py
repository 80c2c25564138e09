"""Rejection sampling: the policy imitates its own successes together with the recorded ones."""

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.choice import start_baseline, validation_successes
from dreamgym_lg.experiment.evaluation import START
from dreamgym_lg.experiment.imitation import imitate, recorded_successes, with_segments
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.start import start_weights
from dreamgym_lg.experiment.workspace import TRAIN, Workspace
from dreamgym_lg.learner import Groups
from dreamgym_lg.types import Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

_UPDATES = "stage/train/rft"
"""Record name: number of updates, folder of the weights, digest of the imitated successes, and last metrics."""
_METRICS = ("skipped", "solved_tasks")


class RejectionLearner:
    """Imitates recorded successes and the policy's own, each time from the start weights.

    This is ReST-EM (Singh et al. 2023) with recorded episodes beside the policy's own. Training plays the tasks without a
    recorded success (`gate.trainable_tasks`). An update keeps the old weights if there is no new success, or if imitation
    solves fewer validation tasks.

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
        if name := work.record(_UPDATES).get("folder"):
            self._load(name)

    @property
    def iteration(self) -> int:
        """Number of finished updates."""
        return int(self._work.record(_UPDATES).get("finished", 0))

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last update: `skipped` and `solved_tasks`. Each solved task adds one success to imitate."""
        done = self._work.record(_UPDATES)
        return {name: done[name] for name in _METRICS if name in done}

    def update(self, groups: Groups) -> Mapping[str, float]:
        """Imitate the successes of all iterations in the replay buffer, those of `groups` included."""
        work, done, iteration = self._work, self._work.record(_UPDATES), self.iteration
        played = work.replay_buffer.trajectories(run=work.run_name(TRAIN), errors=False)
        start, successes = start_weights(work), new_successes(each for each in played if each.iteration <= iteration)
        new = [replace(each, segments=()) for each in with_segments(work, successes, start)] if successes else []
        digest = sha256(repr(sorted((each.task.id, _actions(each)) for each in new)).encode()).hexdigest()
        folder, skipped, unused = done.get("folder"), not new or digest == done.get("digest"), None
        same = "; none is new, and the weights stay" if skipped else ""
        work.say(f"{len(new)} tasks without a recorded success are solved, and imitated beside the recorded ones{same}")
        if not skipped:
            imitate(work, name := f"rft{iteration}", [*recorded_successes(work), *new], start)
            skipped = self._is_worse(name, than=folder or start_baseline(work))
            unused = name if skipped else folder
            folder = folder if skipped else name
            if not skipped:
                self._load(name)
        figures = {"finished": iteration + 1, "folder": folder, "digest": digest}
        work.keep_record(_UPDATES, {**figures, "skipped": int(skipped), "solved_tasks": len(new)})
        if unused:
            shutil.rmtree(work.models / unused, ignore_errors=True)
        return self.metrics

    def _is_worse(self, name: str, *, than: str) -> bool:
        """True if policy `name` solves fewer of the same validation tasks than policy `than`."""
        new, old = validation_successes(self._work, name), validation_successes(self._work, than)
        new_panel, old_panel = (self._work.record(f"stage/{each}/best").get("validation") for each in (name, than))
        if new is None or old is None or new >= old or new_panel != old_panel:
            return False
        self._work.say(f"it wins {new} validation tasks, and the policy before it {old}: the weights before it stay")
        return True

    def _load(self, folder: str) -> None:
        """Load the weights of `models/FOLDER` into the policy."""
        from dreamgym_lg.integrations.transformers.loading import load_model

        assert self._policy.model is not None  # as `__init__` makes sure
        self._policy.model.load_state_dict(load_model(self._work.models / folder, device="cpu").state_dict())


def _actions(episode: Trajectory) -> tuple[str, ...]:
    return tuple(step.action for step in episode.steps)


def new_successes(played: Iterable[Trajectory]) -> list[Trajectory]:
    """The most frequent success of each task, among those without an invalid action.

    A rare success is more often luck, such as a change that was made without looking anything up.
    """
    by_task = defaultdict[str, defaultdict[tuple[str, ...], list[Trajectory]]](lambda: defaultdict(list))
    for each in played:
        if each.success and not each.invalid_actions:
            by_task[each.task.id][_actions(each)].append(each)
    return [max(successes.values(), key=len)[0] for successes in by_task.values()]
