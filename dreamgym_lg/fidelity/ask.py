"""An experience model asked about the steps of real episodes: after the real history (teacher-forced) and after its own
answers (teacher-free)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from dreamgym_lg.actions import is_answer
from dreamgym_lg.environment import CheckAction, unrefused_steps
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.experience.grounding import Grounds
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.predictions import Exchange
from dreamgym_lg.experience.prompt_formats import is_tool_task
from dreamgym_lg.experience.training_data import recorded_exchanges
from dreamgym_lg.types import Prediction, Step, Task, Trajectory

Ablation = Literal["retrieval", "history", "reasoning"]
"""What the experience model is left without: demonstrations of similar real steps; everything before the last observation;
the reasoning of the steps before (what it writes about the step itself stays, it is part of the answer's form)."""

ABLATIONS: tuple[Ablation, ...] = ("retrieval", "history", "reasoning")

Status = Literal["continues", "failure", "success"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One step that was really played, and the dream's answer to its action."""

    number: int
    """Position in the episode, from 1."""
    step: Step
    success: bool
    """Whether this step really completed the task."""
    answer: Prediction | None
    """None if it could not be read or, teacher-free, the dream was over before this step."""
    decided_by: str = "model"
    """Which part decided the answer (`Step.decided_by`)."""

    @property
    def real_status(self) -> Status:
        return "success" if self.success else "failure" if self.step.terminated else "continues"

    @property
    def dreamed_status(self) -> Status | None:
        if self.answer is None:
            return None
        return "success" if self.answer.success else "failure" if self.answer.terminated else "continues"

    @property
    def called_invalid(self) -> bool:
        return self.answer is not None and not self.answer.valid


class Replay(NamedTuple):
    """The actions of a real episode, played again in the dream."""

    real: Trajectory
    dreamed: Trajectory
    """Up to the dream's own end; `error` if an answer could not be read."""
    answered: list[Answered]
    """Every step put to the dream, those after its end without an answer."""


class Asker(NamedTuple):
    """An experience model with the conditions under which it is asked."""

    experience: ExperienceModel
    slots: asyncio.Semaphore
    """Bounds the questions asked at once."""
    check_action: CheckAction | None = None
    without: Ablation | None = None
    grounding: Grounds | None = None
    """Answers what real traces know; those of the task that is asked about stay out of it."""

    async def forced(self, trajectory: Trajectory) -> list[Answered]:
        """Ask about every step after the real history; steps that `check_action` refuses are not asked."""
        trajectory = dreamable(trajectory)
        exchanges = recorded_exchanges(self.experience, trajectory, self.check_action)
        numbered = unrefused_steps(trajectory, self.check_action)
        questions = [
            self._answer(trajectory.task, exchanges[:position], step.observation, step.action)
            for position, (_, step) in enumerate(numbered)
        ]
        answers = await asyncio.gather(*questions)
        return [_answered(trajectory, *each, *answer) for each, answer in zip(numbered, answers, strict=True)]

    async def free(self, trajectory: Trajectory) -> Replay:
        """Play the recorded actions again in the dream, each after the dream's own answers: how an episode drifts."""
        trajectory = dreamable(trajectory)
        task = await self.experience.anoted(trajectory.task)
        history: list[Exchange] = []
        steps: list[Step] = []
        answered: list[Answered] = []
        observation, error, over = str(trajectory.task.metadata["observation"]), None, False
        for number, step in unrefused_steps(trajectory, self.check_action):
            answer, decided_by = None, ""
            if not over:
                answer, decided_by = await self._answer(task, history, observation, step.action)
                error = "PredictionFailed: the answer could not be read" if answer is None else None
                over = answer is None or answer.terminated
            if answer is not None:
                found = self._found(task, history, observation, step.action)
                history.append(Exchange(step.action, answer, found))
                steps.append(_dreamed(step.action, observation, answer))
                observation = answer.observation
            answered.append(_answered(trajectory, number, step, answer, decided_by))
        success = bool(history) and history[-1].prediction.success
        dreamed = replace(trajectory, steps=steps, source="synthetic", success=success, error=error, segments=())
        return Replay(trajectory, dreamed, answered)

    def _found(self, task: Task, history: Sequence[Exchange], observation: str, action: str) -> tuple[Step, ...]:
        return () if self.without == "retrieval" else self.experience.demonstrations(observation, action, task, history)

    async def _answer(
        self, task: Task, history: Sequence[Exchange], observation: str, action: str
    ) -> tuple[Prediction | None, str]:
        """The answer, None if it cannot be read, and which part decided it."""
        known = self.grounding.decide(task, history, action, unseen=True) if self.grounding is not None else None
        if known is not None:
            return known.prediction, known.decided_by
        found = self._found(task, history, observation, action)
        shown = [self._shown(exchange) for exchange in history]
        if self.without == "history":  # an episode that begins here
            task, shown = replace(task, metadata={**task.metadata, "observation": observation}), []
        async with self.slots:
            try:
                answer = await self.experience.apredict(task, shown, action, found)
            except PredictionFailed:  # anything else is raised: a server that is down says nothing about the model
                return None, "model"
        if is_tool_task(task) and not is_answer(action):  # as in the dream: a tool ends nothing
            answer = answer._replace(terminated=False, success=False)
        return answer, "model"

    def _shown(self, exchange: Exchange) -> Exchange:
        if self.without == "retrieval":
            return exchange._replace(demonstrations=())
        if self.without == "reasoning":
            bare = "valid" if exchange.prediction.valid else "invalid"
            return exchange._replace(prediction=exchange.prediction._replace(reasoning=bare))
        return exchange


def dreamable(trajectory: Trajectory) -> Trajectory:
    """The trajectory with its first observation in the task's metadata, where a dream begins; imported traces may lack it."""
    if trajectory.task.metadata.get("observation") or not trajectory.steps:
        return trajectory
    metadata = {**trajectory.task.metadata, "observation": trajectory.steps[0].observation}
    return replace(trajectory, task=replace(trajectory.task, metadata=metadata))


def _answered(trajectory: Trajectory, number: int, step: Step, answer: Prediction | None, decided_by: str) -> Answered:
    success = step.terminated and trajectory.success
    return Answered(number=number, step=step, success=success, answer=answer, decided_by=decided_by)


def _dreamed(action: str, observation: str, answer: Prediction) -> Step:
    return Step(
        observation=observation,
        action=action,
        next_observation=answer.observation,
        reward=answer.reward,
        terminated=answer.terminated,
        valid=answer.valid,
        reasoning=answer.reasoning,
    )
