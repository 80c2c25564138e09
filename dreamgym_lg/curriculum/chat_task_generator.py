"""Variations of tasks by a chat model, in the paper's two stages: several are proposed, then one is selected."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from dreamgym_lg.curriculum.task_generator import variation
from dreamgym_lg.dream.prompts import bind_schema, default_format, encoded, json_object, load_prompt
from dreamgym_lg.errors import ModelUnavailable, PredictionFailed
from dreamgym_lg.hosted.hosted import Hosted, hosted_for
from dreamgym_lg.tasks import first_observation, schemas
from dreamgym_lg.token_recorder import unrecorded
from dreamgym_lg.types import Step, Task, Trajectory

logger = logging.getLogger(__name__)

PROPOSE, SELECT = "task-variations-1", "task-selection-1"
"""The prompts of the two stages."""
_PROMPT_STEPS, _PROMPT_CHARACTERS = 8, 300
"""Maximum steps of an episode in a prompt, and characters of each action and answer."""


def _schema(title: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    closed = {"required": list(properties), "additionalProperties": False}
    return {"title": title, "description": title, "type": "object", "properties": dict(properties), **closed}


_TEXT = {"type": "string"}
_PROPOSAL = _schema("variation", {"task": _TEXT, "rubric": _TEXT, "change": _TEXT})
SCHEMAS = {
    PROPOSE: _schema("variations", {"tasks": {"type": "array", "items": _PROPOSAL}}),
    SELECT: _schema("selection", {"reason": _TEXT, "chosen": {"type": "integer"}}),
}


class Proposal(NamedTuple):
    """A variation as the model wrote it."""

    task: str
    """The policy's instruction or first observation."""
    rubric: str
    change: str


class ChatTaskGenerator:
    """A `TaskGenerator` by any chat model: one call proposes variations, a second selects one of them or none.

    The prompt holds of each seed task the rewards of the last iteration's episodes, and the best and the worst of these.

    Args:
        model: A temperature above 0 gives more different tasks.
        hosted: Limits and retries of a model behind a network. Default: as for `Model`.
        num_proposals: Variations that the first stage writes.
    """

    def __init__(self, model: BaseChatModel, *, hosted: Hosted | None = None, num_proposals: int = 4) -> None:
        self.model, self.hosted, self.num_proposals = model, hosted or hosted_for(model), num_proposals
        structured = default_format(model) == "json_schema"
        self._models = {prompt: bind_schema(model, schema) if structured else model for prompt, schema in SCHEMAS.items()}

    def __call__(self, task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
        """As `TaskGenerator`. Also None where the model does not answer or cannot be read, which is logged; raises
        `BudgetExceeded`."""
        seeds = {task.id: task} | {trajectory.task.id: trajectory.task for trajectory in trajectories}
        summaries = [_summary(seed, trajectories) for seed in seeds.values()]
        try:
            request = {"seed_tasks": summaries, "number": self.num_proposals, "tools": schemas(task)}
            proposals = read_proposals(self._reply(PROPOSE, request))
            numbered = [{"number": number, **proposal._asdict()} for number, proposal in enumerate(proposals, 1)]
            reply = self._reply(SELECT, {"seed_task": summaries[0], "variations": numbered})
            chosen = read_selection(reply, len(proposals))
        except (PredictionFailed, ModelUnavailable) as error:  # no reason to stop a training
            logger.warning("no variation of task %s: %s", task.id, error)
            return None
        return variation(task, proposals[chosen - 1].task, rubric=proposals[chosen - 1].rubric) if chosen else None

    def _reply(self, prompt: str, request: Mapping[str, Any]) -> str:
        model, messages = self._models[prompt], [SystemMessage(load_prompt(prompt)), HumanMessage(encoded(request))]
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
    """The variations of an answer. Raises `PredictionFailed` without one, or for one without task, rubric or change."""
    tasks = json_object(text).get("tasks")
    if not isinstance(tasks, list) or not tasks:
        raise PredictionFailed("the answer has no 'tasks', a list of variations")
    proposals = []
    for each in tasks:
        fields = [each.get(name) for name in Proposal._fields] if isinstance(each, dict) else [None]
        if not all(isinstance(field, str) and field.strip() for field in fields):
            raise PredictionFailed(f"the variation {str(each)[:200]} lacks one of {', '.join(Proposal._fields)}")
        proposals.append(Proposal(*(str(field).strip() for field in fields)))
    return proposals


def read_selection(text: str, number: int) -> int:
    """The number chosen, 0 for none; raises `PredictionFailed` for another number than 0 to `number`."""
    chosen = json_object(text).get("chosen")
    if not isinstance(chosen, int) or isinstance(chosen, bool) or not 0 <= chosen <= number:
        raise PredictionFailed(f"'chosen' is {chosen!r}; expected a number from 0 to {number}")
    return chosen
