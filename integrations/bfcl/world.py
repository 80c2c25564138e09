"""BFCL multi-turn as the world of an experiment, its tool calls written as text."""

from collections.abc import Iterator, Mapping, Sequence

from dreamgym_lg.actions import is_answer
from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.bfcl.apis import check_call
from dreamgym_lg.integrations.bfcl.data import load_tasks
from dreamgym_lg.integrations.bfcl.environment import BFCLEnvironment
from dreamgym_lg.integrations.bfcl.scripted_policies import offline_trajectories
from dreamgym_lg.types import Split, Task, Trajectory

KINDS = ("demonstration", "mistaken")
"""The ground truth's calls, and the same with mistakes that make the episode fail."""


class BFCLDream(DreamEnvironment):
    """A dream that knows by its own history how many user turns have ended: a dreamed request may be worded otherwise."""

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        task = self._playing()
        ended = sum(is_answer(exchange.action) for exchange in self._history)
        return check_call(task, action, turn=ended)


def next_request(task: Task, history: Sequence[Exchange], seed: int) -> list[str]:
    """`HiddenFacts` of BFCL: what the scripted user says next, before each step; "" once the last request was made."""
    requests = [*task.metadata.get("user_turns", ())[1:], ""]
    facts, ended = list[str](), 0
    for exchange in history:
        facts.append(requests[min(ended, len(requests) - 1)])
        ended += is_answer(exchange.action)
    return [*facts, requests[min(ended, len(requests) - 1)]]


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
    hidden_facts = staticmethod(next_request)

    def __init__(self, category: str = "multi_turn_base", *, max_steps: int = 40) -> None:
        load_tasks(category)  # an unknown one is named at once
        self.category, self.max_steps = category, max_steps
        self.arguments = {"category": category, "max_steps": max_steps}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        return [task for task in load_tasks(self.category)[:limit] if task.split == split]

    def create_environment(self) -> BFCLEnvironment:
        return BFCLEnvironment()

    def create_dream(self, experience: ExperienceModel) -> Environment:
        return BFCLDream(experience, rewards=self.rewards)

    def check_action(self, task: Task, action: str, observations: Sequence[str]) -> str | None:
        """What the tools' own schemas refuse, and calls of tools that are withheld until a later request of the user."""
        requests, ended = task.metadata["user_turns"][1:], 0
        for observation in observations[1:]:
            ended += ended < len(requests) and observation == requests[ended]
        return check_call(task, action, turn=ended)

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
