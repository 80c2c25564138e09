"""The dream: an experience model as an `Environment`, which the same agents, rollouts and checks take as a real one."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from dreamgym_lg.actions import is_answer
from dreamgym_lg.environment import CheckAction, Environment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.experience.prompt_formats import first_observation, is_tool_task, with_tools
from dreamgym_lg.types import Prediction, Step, StepResult, Task

Rewards = Literal["outcome", "score"]
"""What a dreamed episode pays, always between 0 and 1 in sum.

`outcome`: 1 at the last step of a success, 0 at every other step (paper, section 4.1). An episode that is cut earns nothing.
`score`: the change of the score that the experience model dreams, for an environment with partial credit. The score begins at
0 and is clipped to [0, 1] after each step.
"""


class DreamEnvironment(Environment):
    """An environment played by an experience model; nothing real is touched.

    Args:
        check_action: The real environment's own check, so that the dream refuses what the real environment would.
        rewards: What the steps pay; say it as the real environment does.
    """

    def __init__(
        self, experience: ExperienceModel, *, check_action: CheckAction | None = None, rewards: Rewards = "outcome"
    ) -> None:
        if rewards not in get_args(Rewards):
            raise ConfigurationError.unknown("rewards", rewards, get_args(Rewards))
        self.experience, self.rewards = experience, rewards
        self._check_action = check_action
        self._task: Task | None = None
        self._history: list[Exchange] = []
        self._observation = ""
        self._score = 0.0

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return self._check_action(action, observations) if self._check_action else None

    def reset(self, task: Task) -> str:
        if not first_observation(task):
            raise ConfigurationError(
                f"task {task.id!r} has no metadata['observation'] and no instruction: a dream of it has nothing to begin with"
            )
        self._task, self._history, self._score = task, [], 0.0
        self._observation = first_observation(task)
        return self._observation

    async def areset(self, task: Task) -> str:
        return self.reset(task)

    def resume(self, task: Task, history: Sequence[Exchange]) -> str:
        """Begin an episode behind steps that are given, such as recorded ones; returns the last observation."""
        self.reset(task)
        self._history = list(history)
        for exchange in history:
            self._observation = exchange.prediction.observation
            self._clipped(exchange.prediction.reward)
        return self._observation

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._task = with_tools(self._playing(), tools)

    def step(self, action: str) -> StepResult:
        task = self._playing()
        found = self.experience.demonstrations(self._observation, action, task)
        return self._advance(action, found, self.experience.predict(task, self._history, action, found))

    async def astep(self, action: str) -> StepResult:
        task = self._playing()
        found = self.experience.demonstrations(self._observation, action, task)
        return self._advance(action, found, await self.experience.apredict(task, self._history, action, found))

    def _playing(self) -> Task:
        if self._task is None:
            raise RuntimeError("step before reset, or after the episode's end: call reset(task)")
        return self._task

    def _advance(self, action: str, found: tuple[Step, ...], prediction: Prediction) -> StepResult:
        if self.rewards == "score":  # the next prompt shows the score that is paid
            prediction = prediction._replace(reward=self._clipped(prediction.reward))
        self._history.append(Exchange(action, prediction, found))
        self._observation = prediction.observation
        if is_tool_task(self._playing()):  # a tool ends nothing: the agent does, with its answer
            prediction = prediction._replace(terminated=is_answer(action), success=prediction.success and is_answer(action))
        if prediction.terminated:
            self._task = None
        info = {"success": prediction.success, "valid": prediction.valid, "reasoning": prediction.reasoning}
        reward = prediction.reward if self.rewards == "score" else float(prediction.success)
        return StepResult(prediction.observation, reward, prediction.terminated, False, info)

    def _clipped(self, reward: float) -> float:
        """The reward, cut so that the score stays in [0, 1]."""
        before, after = self._score, self._score + reward
        self._score = min(max(after, 0.0), 1.0)
        return reward if self._score == after else self._score - before
