"""The recorded successes of similar tasks: what a tool agent's final answer is judged by.

The nearest transitions of a final answer would be answers that say the same, whatever had been asked: "It is delivered." to a
refund request finds the deliveries. So they are looked up by the task, and by what the tools answered.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from dreamgym_lg.actions import is_answer
from dreamgym_lg.experience.prompt_formats import first_observation, words
from dreamgym_lg.experience.rules import Played, called, played_steps, success_shown
from dreamgym_lg.replay.hashed_words import phi
from dreamgym_lg.types import Step, Task, Trajectory


class SimilarSuccesses:
    """The final answers of recorded successes of train tasks, by how similar their tasks are.

    Args:
        recorded: Any trajectories; dreamed and failed ones are left out, and those without an answer at their end alone.
        writes: The tools that change the world.
    """

    def __init__(self, recorded: Iterable[Trajectory], writes: Collection[str] = ()) -> None:
        real = (each for each in recorded if each.success and each.source != "synthetic")
        used = [each for each in real if ends_in_answer(each)]
        self._tasks, self._recorded = np.array([each.task.id for each in used]), used
        self._asked = phi([(_wording(first_observation(each.task)), "") for each in used])
        self._writes = frozenset(writes)
        answers = (step.next_observation for each in used for step in each.steps[:-1])
        self.told = frozenset[str]().union(*map(words, answers))
        """Every word that a tool has answered."""
        self._found = phi([("", self._looked_up(played_steps(each.steps))) for each in used])

    def nearest(self, task: Task, history: Sequence[Played], k: int) -> tuple[Step, ...]:
        """The `k` most similar ones, none of the same task, best first, each different. Args: `history`, the calls so far."""
        if not self._recorded:
            return ()
        asked, found = phi([(_wording(first_observation(task)), ""), ("", self._looked_up(history))])
        alike = self._asked @ asked + self._found @ found
        alike[self._tasks == task.id] = -np.inf
        tools = {"tools": task.metadata["tools"]}  # traces may not hold them
        shown: dict[tuple[str, str, str], Step] = {}
        for row in np.argsort(-alike, kind="stable"):
            if len(shown) == k or alike[row] == -np.inf:
                break
            recorded = self._recorded[row]
            step = success_shown(replace(recorded.task, metadata={**recorded.task.metadata, **tools}), recorded.steps)
            shown.setdefault((step.observation, step.action, step.reasoning), step)
        return tuple(shown.values())

    def _looked_up(self, history: Sequence[Played]) -> str:
        """What the reading tools answered: what a wrong write answered would find the successes that made it."""
        calls = ((called(each.action), each.answer) for each in history)
        return _wording(*(answer for call, answer in calls if call is not None and call.name not in self._writes))


def _wording(*texts: str) -> str:
    """The texts with every number and id alike: a request for two orders is like another one for two."""
    return re.sub(r"[\w-]*\d[\w-]*", "0", " ".join(texts))


def ends_in_answer(trajectory: Trajectory) -> bool:
    """Whether it is calls, and one answer at the end."""
    answers = [is_answer(step.action) for step in trajectory.steps]
    return sum(answers) == 1 and answers[-1]
