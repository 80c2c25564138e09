"""Task generators (paper, section 4). The checks of generated tasks, and a generator that is a chat model."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import Any, NamedTuple, Protocol

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from pydantic import BaseModel, StrictInt, StrictStr

from dreamgym_lg.dream.prompts import WrittenText, bind_form, json_prompt, read_form
from dreamgym_lg.errors import ModelUnavailable, PredictionFailed
from dreamgym_lg.hosted import Hosted, hosted_for
from dreamgym_lg.splits import common_entities, entities, words
from dreamgym_lg.tasks import described, first_observation, schemas
from dreamgym_lg.token_recorder import unrecorded
from dreamgym_lg.types import Step, Task, Trajectory

NEAR = 0.8
"""Jaccard index of words above which tasks about the same entities count as one."""


class TaskGenerator(Protocol):
    """Writes a variation of a task."""

    def __call__(self, task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
        """A variation of `task`, or None where there is none. Its origin is `synthetic`, its parent `task`.

        Args:
            trajectories: The last iteration's episodes of the tasks with the highest reward variance, highest first. `task`
                is one of these tasks.
            rng: Source of all randomness, so that a resumed run generates the same tasks.
        """


def variation(task: Task, text: str, *, rubric: str) -> Task:
    """A synthetic copy of `task` that begins with `text` in place of its first observation.

    Args: `rubric`, the criterion of its success.
    """
    system = [message for message in task.messages if message["role"] == "system"]
    digest = sha256(f"{task.instruction}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return replace(
        task,
        id=f"{task.environment}/generated-{digest}",
        # keep the rest of the instruction, such as a system prompt or a game's rules
        instruction=task.instruction.replace(first_observation(task), text),
        observation=text if task.observation else "",
        messages=[*system, {"role": "user", "content": text}] if task.messages else (),
        rubric=rubric,
        goal={},  # the user's goal belongs to the original request
        origin="synthetic",
        parent_id=task.id,
        split="train",
    )


class TaskChecks:
    """Checks generated tasks against recorded ones.

    Called with a task, it returns the reason against training on it, or None:

    * `known`: a known task has nearly the same words and the same ids, amounts and names (`splits.entities`);
    * `held_out`: it shares one of these with an evaluation task, or has nearly the same words. Entities of many tasks
      (`splits.common_entities`) do not count;
    * `invented`: it names an entity that occurs in no training trace, so that no look-up could answer;
    * `no_judge`: nothing decides its outcome.

    Args:
        known: The tasks so far, generated ones included. A task that passes is added to them.
        evaluation: Tasks of the splits `validation` and `test`.
        trajectories: Real trajectories of training tasks. None: `invented` is not checked.
        judged: Tells if something decides a task's outcome. Default: True for a task with a rubric.
    """

    def __init__(
        self,
        known: Iterable[Task],
        *,
        evaluation: Iterable[Task],
        trajectories: Iterable[Trajectory] | None = None,
        judged: Callable[[Task], bool] = lambda task: bool(task.rubric.strip()),
    ) -> None:
        self._known = {task.id: _TaskText.of(task) for task in known}
        self._evaluation, self._judged = [_TaskText.of(task) for task in evaluation], judged
        by_task = [text.entities for text in (*self._known.values(), *self._evaluation)]
        self._held_out = {entity for text in self._evaluation for entity in text.entities} - common_entities(by_task)
        self._recorded: set[str] | None = None
        if trajectories is not None:
            self._recorded = {word for each in trajectories for text in _texts(each) for word in words(text)}

    def __call__(self, task: Task) -> str | None:
        text = _TaskText.of(task)
        # the same id is the same task, generated again by a run that was interrupted before it was played
        if any(text.is_near(other) for id, other in self._known.items() if id != task.id):
            return "known"
        if text.entities & self._held_out or any(map(text.is_near, self._evaluation)):
            return "held_out"
        if self._recorded is not None and not self._recorded.issuperset(text.entity_words):
            return "invented"
        if not self._judged(task):
            return "no_judge"
        self._known[task.id] = text
        return None


class _TaskText(NamedTuple):
    """Words and entities of a task's first observation."""

    words: frozenset[str]
    entities: frozenset[str]

    @classmethod
    def of(cls, task: Task) -> "_TaskText":
        text = first_observation(task)
        return cls(frozenset(words(text)), entities(text))

    @property
    def entity_words(self) -> set[str]:
        return {word for entity in self.entities for word in entity.split(" ")}

    def is_near(self, other: "_TaskText") -> bool:
        """True if few words differ, and none of them is part of an entity."""
        differing, named = self.words ^ other.words, self.entity_words | other.entity_words
        return len(differing) <= (1 - NEAR) * len(self.words | other.words) and differing.isdisjoint(named)


def _texts(trajectory: Trajectory) -> Iterable[str]:
    steps = (text for step in trajectory.steps for text in (step.action, step.next_observation))
    return (described(trajectory.task), first_observation(trajectory.task), *steps)


# --- by a chat model ---------------------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

PROPOSE, SELECT = "task-variations-1", "task-selection-1"
"""The prompts of the two stages."""
_PROPOSALS = 4
"""Variations that the first stage writes."""
_PROMPT_STEPS, _PROMPT_CHARACTERS = 8, 300
"""Maximum steps of an episode in a prompt, and characters of each action and answer."""


class Proposal(BaseModel, extra="forbid", title="variation"):
    """A variation as the model wrote it. Its task is the policy's instruction or first observation."""

    task: WrittenText
    rubric: WrittenText
    change: WrittenText


class _Variations(BaseModel, extra="forbid", title="variations"):
    """Variations of tasks."""

    tasks: list[Proposal]


class _Selection(BaseModel, extra="forbid", title="selection"):
    """The number of a variation, 0 for none."""

    reason: StrictStr
    chosen: StrictInt


class ChatTaskGenerator:
    """A `TaskGenerator` by any chat model. One call proposes variations, a second selects one of them or none.

    For each seed task, the prompt shows the rewards of the last iteration's episodes, and the best and the worst episode.

    Args:
        model: A chat model; a temperature above 0 makes the tasks more diverse.
        hosted: Limits and retries of a hosted model. Default: as for `Model`.
    """

    def __init__(self, model: BaseChatModel, *, hosted: Hosted | None = None) -> None:
        self.model, self.hosted = model, hosted or hosted_for(model)
        self._models = {PROPOSE: bind_form(model, _Variations), SELECT: bind_form(model, _Selection)}

    def __call__(self, task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
        """As `TaskGenerator`; also None, with a warning, if the model fails. Raises `BudgetExceeded`."""
        seeds = {task.id: task} | {trajectory.task.id: trajectory.task for trajectory in trajectories}
        summaries = [_summary(seed, trajectories) for seed in seeds.values()]
        try:
            request = {"seed_tasks": summaries, "number": _PROPOSALS, "tools": schemas(task)}
            proposals = read_proposals(self._reply(PROPOSE, request))
            numbered = [{"number": number, **proposal.model_dump()} for number, proposal in enumerate(proposals, 1)]
            reply = self._reply(SELECT, {"seed_task": summaries[0], "variations": numbered})
            chosen = read_selection(reply, len(proposals))
        except (PredictionFailed, ModelUnavailable) as error:  # training goes on without this variation
            logger.warning("no variation of task %s: %s", task.id, error)
            return None
        return variation(task, proposals[chosen - 1].task, rubric=proposals[chosen - 1].rubric) if chosen else None

    def _reply(self, prompt: str, request: Mapping[str, Any]) -> str:
        model, messages = self._models[prompt], json_prompt(prompt, request)
        with unrecorded():
            answer: AIMessage = self.hosted.ask(model, messages) if self.hosted else model.invoke(messages)
        return answer.text


def _summary(task: Task, trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """A seed task with its rewards, and its best and worst episode in short."""

    def brief(step: Step) -> dict[str, str]:
        return {"action": step.action[:_PROMPT_CHARACTERS], "answer": step.next_observation[:_PROMPT_CHARACTERS]}

    ranked = sorted((each for each in trajectories if each.task.id == task.id), key=lambda each: each.reward)
    episodes = ranked if len(ranked) < 2 else [ranked[0], ranked[-1]]
    return {
        "task": first_observation(task),
        "rubric": task.rubric,
        "rewards": [each.reward for each in ranked],
        "episodes": [{"reward": each.reward, "steps": list(map(brief, each.steps[:_PROMPT_STEPS]))} for each in episodes],
    }


def read_proposals(text: str) -> list[Proposal]:
    """The variations in an answer. Raises `PredictionFailed` if there is none or a field is empty."""
    if not (proposals := read_form(text, _Variations).tasks):
        raise PredictionFailed("the answer has no 'tasks', a list of variations")
    return proposals


def read_selection(text: str, number: int) -> int:
    """The selected number, 0 for none. Raises `PredictionFailed` for a number not in 0 to `number`."""
    if not 0 <= (chosen := read_form(text, _Selection).chosen) <= number:
        raise PredictionFailed(f"'chosen' is {chosen!r}; expected a number from 0 to {number}")
    return chosen
