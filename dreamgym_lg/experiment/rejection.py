"""Rejection sampling: successes that training finds are imitated together with the recorded ones."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.evaluation import START
from dreamgym_lg.experiment.imitation import imitate, recorded_successes, start_weights
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.workspace import TRAIN, Workspace
from dreamgym_lg.learner import Groups
from dreamgym_lg.types import Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

_MOST = 2
"""Different successes of a task that are imitated, so that easy tasks do not crowd out the others."""
_DONE = "stage/train/rft"
"""Record of the iterations in the weights, and of the last update's metrics."""


class RejectionLearner:
    """Imitates recorded successes and the training's, each time from the start weights.

    This is ReST-EM (Singh et al. 2023) with recorded episodes beside the policy's own. The training plays the tasks that have
    no recorded success (`create_curriculum`). An iteration that adds no success leaves the weights as they are.

    Args: `policy`, an imitation of the recorded successes (`train_base`); its weights are replaced.

    Raises `ConfigurationError` for an option, and without the record of such an imitation.
    """

    def __init__(self, work: Workspace, policy: "LocalChatModel", path: Path, settings: Settings, **options: Any) -> None:
        if options:
            raise ConfigurationError(f"learner='rft' has no option {min(options)!r}: it imitates as train_base() does")
        if work.record("stage/train/from") or not work.record(START):
            raise ConfigurationError(
                "learner='rft' imitates from the weights that train_base() begins with: call it first, and leave out policy="
            )
        self._work, self._policy = work, policy
        if self.metrics.get("new_successes"):
            self._load()

    @property
    def iteration(self) -> int:
        """Number of finished updates."""
        return int(self._work.record(_DONE).get("finished", 0))

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last update: `new_successes`, imitated beside the recorded ones, and `solved_tasks`."""
        done = self._work.record(_DONE)
        return {name: done[name] for name in ("new_successes", "solved_tasks") if name in done}

    def update(self, groups: Groups) -> Mapping[str, float]:
        """Imitate the successes of all iterations so far. The buffer has them, `groups` too."""
        work, iteration = self._work, self.iteration
        played = work.replay_buffer.trajectories(run=work.run_name(TRAIN), errors=False)
        new = new_successes(each for each in played if each.iteration <= iteration)
        solved, more = len({each.task.id for each in new}), len(new) > self.metrics.get("new_successes", 0)
        same = "" if more else "; none is new, and the weights stay"
        work.say(f"{len(new)} episodes beside the recorded ones, of {solved} tasks without a recorded success{same}")
        if more:
            imitate(work, "rft", [*recorded_successes(work), *new], start_weights(work))
            self._load()
        work.keep_record(_DONE, {"finished": iteration + 1, "new_successes": len(new), "solved_tasks": solved})
        return self.metrics

    def _load(self) -> None:
        """Put the imitation's weights in the place of the policy's."""
        imitation = self._work.policy("rft")
        assert self._policy.model is not None and imitation.model is not None  # both are trained here
        self._policy.model.load_state_dict(imitation.model.state_dict())


def new_successes(played: Iterable[Trajectory]) -> list[Trajectory]:
    """The shortest different successes of each task, `_MOST` at most, without an invalid action."""
    by_task = defaultdict[str, dict[tuple[str, ...], Trajectory]](dict)
    for each in sorted(played, key=lambda each: len(each.steps)):
        if each.success and not each.invalid_actions:
            by_task[each.task.id].setdefault(tuple(step.action for step in each.steps), each)
    return [replace(each, segments=()) for successes in by_task.values() for each in islice(successes.values(), _MOST)]
