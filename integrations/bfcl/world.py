"""BFCL multi-turn as the world of an experiment, its tool calls written as text."""

from collections.abc import Iterator, Mapping, Sequence

from dreamgym_lg.actions import is_answer
from dreamgym_lg.dream import Dream, Episode, Model, ModelJudge, ScriptedUser
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.bfcl.apis import BFCLEnvironment, check_call
from dreamgym_lg.integrations.bfcl.data import load_tasks
from dreamgym_lg.integrations.bfcl.scripted_policies import offline_trajectories
from dreamgym_lg.integrations.text_games.game import Rules
from dreamgym_lg.types import Split, Task, Trajectory

KINDS = ("demonstration", "mistaken")
"""The ground truth's calls, and the same with mistakes that make the episode fail."""


def next_request(episode: Episode) -> str | None:
    """The scripted user's next message; None once the last request was made."""
    requests = episode.task.metadata.get("user_turns", ())
    ended = sum(is_answer(step.action) for step in episode.steps) + 1
    return str(requests[ended]) if ended < len(requests) else None


def refusal(task: Task, action: str, observations: Sequence[str]) -> str | None:
    """Refusal of a call by the tools' schemas, or of a withheld tool; else None."""
    requests, ended = task.metadata["user_turns"][1:], 0
    for observation in observations[1:]:
        ended += ended < len(requests) and observation == requests[ended]
    return check_call(task, action, turn=ended)


class BFCLWorld(World):
    """One category of BFCL's multi-turn entries, played as text by `BFCLEnvironment`.

    Args:
        category: One of `data.CATEGORIES`.
        max_steps: Actions of an episode, calls and answers, after which it is cut short.
    """

    name = "bfcl"
    settings = Settings(
        episodes={"demonstration": 100, "mistaken": 300},
        retrieved=2,
        retrieved_characters=500,
    )
    assisted = True

    def __init__(self, category: str = "multi_turn_base", *, max_steps: int = 40) -> None:
        load_tasks(category)  # an unknown one is named at once
        self.category, self.max_steps = category, max_steps
        self.arguments = {"category": category, "max_steps": max_steps}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        return [task for task in load_tasks(self.category)[:limit] if task.split == split]

    def create_environment(self) -> BFCLEnvironment:
        return BFCLEnvironment()

    def create_dream(self, model: Model) -> Dream:
        return Dream([Rules(refusal), model], ScriptedUser(next_request), [ModelJudge(model)])

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        """`episodes[kind]` trajectories of each of `KINDS`, at most one demonstration of a task."""
        for kind in episodes:
            if kind not in KINDS:
                raise ConfigurationError.unknown("kind", kind, KINDS)
        left = {True: episodes.get("demonstration", 0), False: episodes.get("mistaken", 0)}
        failures = -(-left[False] // max(len(tasks), 1))
        for trajectory in offline_trajectories(tasks, failures=failures, seed=seed, answers=True):
            if left[trajectory.success] > 0:
                left[trajectory.success] -= 1
                yield trajectory
