"""The dream: an experience model as an `Environment`, which the same agents, rollouts and checks take as a real one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from dreamgym_lg.actions import is_answer, parse_call, render_call
from dreamgym_lg.environment import CheckAction, Environment
from dreamgym_lg.errors import ConfigurationError, PredictionFailed
from dreamgym_lg.experience.grounding import Decision, Grounds
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.notes import Note, notes_of, read_notes, with_notes, write_notes
from dreamgym_lg.experience.predictions import Exchange, believed, check_returns, in_hindsight
from dreamgym_lg.experience.prompt_formats import first_observation, is_tool_task, schemas, with_tools
from dreamgym_lg.experience.rules import call_reasoning, played
from dreamgym_lg.types import Prediction, Step, StepResult, Task

Rewards = Literal["outcome", "score"]
"""What a dreamed episode pays, always between 0 and 1 in sum.

`outcome`: 1 at the last step of a success, 0 at every other step (paper, section 4.1). An episode that is cut earns nothing.
`score`: the change of the score that the experience model dreams, for an environment with partial credit. The score begins at
0 and is clipped to [0, 1] after each step.
"""

_FULL = 0.98
"""A score from which on it counts as 1: three thirds may be dreamed as 0.33 each."""


class DreamEnvironment(Environment):
    """An environment played by an experience model; nothing real is touched.

    Args:
        check_action: The real environment's own check, so that the dream refuses what the real environment would.
        rewards: What the steps pay; say it as the real environment does.
        full_score_completes: With `score`: an episode is a success as soon as its score is 1, and ends, whatever the
            experience model says. One that has read of few successes seldom says that a task is completed.
        pays_once: With `score`: an action that has been paid is not paid again before something is lost. So is every score that
            follows from the state alone (an object counts where it belongs, however often it is put there).
        grounding: What real traces decide before the experience model is asked.
    """

    def __init__(
        self,
        experience: ExperienceModel,
        *,
        check_action: CheckAction | None = None,
        rewards: Rewards = "outcome",
        full_score_completes: bool = False,
        pays_once: bool = False,
        grounding: Grounds | None = None,
    ) -> None:
        if rewards not in get_args(Rewards):
            raise ConfigurationError.unknown("rewards", rewards, get_args(Rewards))
        self.experience, self.rewards, self.grounding = experience, rewards, grounding
        self.full_score_completes = full_score_completes and rewards == "score"
        self.pays_once = pays_once and rewards == "score"
        self._check_action = check_action
        self._task: Task | None = None
        self._history: list[Exchange] = []
        self._observation = ""
        self._score = 0.0
        self._unseen = False

    def check_action(self, action: str, observations: Sequence[str]) -> str | None:
        return self._check_action(self._playing(), action, observations) if self._check_action else None

    def reset(self, task: Task) -> str:
        if not first_observation(task):
            raise ConfigurationError(
                f"task {task.id!r} has no metadata['observation'] and no instruction: a dream of it has nothing to begin with"
            )
        if self.grounding is not None:
            self.grounding.refresh()
        self._task, self._history, self._score, self._unseen, self.annotation = task, [], 0.0, False, None
        self._observation = first_observation(task)
        return self._observation

    async def areset(self, task: Task) -> str:
        return self.reset(task)

    def resume(self, task: Task, history: Sequence[Exchange]) -> str:
        """Begin an episode behind steps that are given, such as recorded ones; returns the last observation.

        The dream is measured so: traces of the same task decide nothing, or each would confirm itself.
        """
        self.reset(task)
        self._unseen = True
        self._history = list(history)
        for exchange in history:
            self._observation = exchange.prediction.observation
            self._clipped(exchange.prediction.reward)
        return self._observation

    def show_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._task = with_tools(self._playing(), tools)

    def step(self, action: str) -> StepResult:
        task = self._playing()
        found = self.experience.demonstrations(self._observation, action, task, self._history)
        if (known := self._known(action)) is not None:
            return self._advance(action, found, *known)
        task = self._note_down(self.experience.noted(task))
        if (told := self._noted(action)) is not None:
            return self._advance(action, found, told, "notes")
        return self._advance(action, found, self.experience.predict(task, self._history, action, found), "model")

    async def astep(self, action: str) -> StepResult:
        task = self._playing()
        found = self.experience.demonstrations(self._observation, action, task, self._history)
        if (known := self._known(action)) is not None:
            return self._advance(action, found, *known)
        task = self._note_down(await self.experience.anoted(task))
        if (told := self._noted(action)) is not None:
            return self._advance(action, found, told, "notes")
        return self._advance(action, found, await self.experience.apredict(task, self._history, action, found), "model")

    def _note_down(self, task: Task) -> Task:
        """Go on in the noted world. What a record answers is noted as it was recorded: records and notes are one world."""
        if task is not self._task and self.grounding is not None:
            noted = [note._replace(answer=self._recorded(task, note)) for note in read_notes(notes_of(task) or "")]
            task = with_notes(task, write_notes(noted))
        self._task = task
        self.annotation = {"notes": notes} if (notes := notes_of(task)) else None
        return task

    def _recorded(self, task: Task, note: Note) -> str:
        assert self.grounding is not None
        known = self.grounding.decide(task, (), render_call(*note.call), unseen=self._unseen)
        return known.prediction.observation if known is not None and known.prediction.valid else note.answer

    def _noted(self, action: str) -> Prediction | None:
        """What the notes answer to a call before anything is changed."""
        task, call = self._playing(), parse_call(action)
        answer = next((note.answer for note in read_notes(notes_of(task) or "") if note.call == call), None)
        if answer is None:
            return None
        writes, history = self.experience.writes, [played(exchange) for exchange in self._history]
        if any(each.valid and (made := parse_call(each.action)) is not None and made.name in writes for each in history):
            return None
        step = Step(observation=self._observation, action=action, next_observation=answer)
        reasoning = call_reasoning(task, history, step, writes)
        told = in_hindsight(replace(step, reasoning=reasoning), success=False)
        return told if self._is_returned(action, told) else None

    def _known(self, action: str) -> Decision | None:
        if self.grounding is None:
            return None
        known = self.grounding.decide(self._playing(), self._history, action, unseen=self._unseen)
        return known if known is not None and self._is_returned(action, known.prediction) else None

    def _is_returned(self, action: str, prediction: Prediction) -> bool:
        """Whether an answer is what the tool returns: of some structures a trace holds the text alone that the policy read."""
        try:
            check_returns(prediction, action, schemas(self._playing()))
        except PredictionFailed:
            return False
        return True

    def _playing(self) -> Task:
        if self._task is None:
            raise RuntimeError("step before reset, or after the episode's end: call reset(task)")
        return self._task

    def _advance(self, action: str, found: tuple[Step, ...], prediction: Prediction, decided_by: str) -> StepResult:
        if self.pays_once and prediction.reward > 0 and self._is_paid(action):
            prediction = believed(prediction._replace(reward=0.0), self._score)
        if self.rewards == "score":  # the next prompt shows the score that is paid
            prediction = prediction._replace(reward=self._clipped(prediction.reward))
        self._history.append(Exchange(action, prediction, found))
        self._observation = prediction.observation
        if self.full_score_completes and self._score >= _FULL:
            prediction = prediction._replace(terminated=True, success=True)
        if is_tool_task(self._playing()):  # a tool ends nothing: the agent does, with its answer
            prediction = prediction._replace(terminated=is_answer(action), success=prediction.success and is_answer(action))
        if prediction.terminated:
            self._task = None
        info = {"success": prediction.success, "valid": prediction.valid, "reasoning": prediction.reasoning}
        info["decided_by"] = decided_by
        reward = prediction.reward if self.rewards == "score" else float(prediction.success)
        return StepResult(prediction.observation, reward, prediction.terminated, False, info)

    def _is_paid(self, action: str) -> bool:
        """Whether the action has been paid since something was lost."""
        for exchange in reversed(self._history):
            if exchange.prediction.reward < 0:
                return False
            if exchange.action == action and exchange.prediction.reward > 0:
                return True
        return False

    def _clipped(self, reward: float) -> float:
        """The reward, cut so that the score stays in [0, 1]."""
        before, after = self._score, self._score + reward
        self._score = min(max(after, 0.0), 1.0)
        return reward if self._score == after else self._score - before
