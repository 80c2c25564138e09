"""Variations of tasks written by a chat model, in the paper's two stages: several are proposed, then one is selected."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.curriculum.task_generator import variation
from dreamgym_lg.dream.prompts import bind_schema, default_format, encoded, json_object, load_prompt
from dreamgym_lg.errors import ModelUnavailable, PredictionFailed
from dreamgym_lg.hosted.chat_model import name_of
from dreamgym_lg.hosted.hosted import Hosted, hosted_for
from dreamgym_lg.tasks import first_observation, schemas
from dreamgym_lg.token_recorder import unrecorded
from dreamgym_lg.types import Task, Trajectory

logger = logging.getLogger(__name__)

PROPOSE, SELECT = "task-variations-1", "task-selection-1"

_SHOWN_EPISODES, _SHOWN_STEPS, _SHOWN_CHARACTERS = 2, 8, 300


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
    """What the policy is told, or first sees."""
    rubric: str
    change: str


class ChatTaskGenerator:
    """A `TaskGenerator` by any chat model: one call proposes variations, a second selects one of them or none.

    Of each seed task it is shown the rewards of the last iteration's episodes, and the best and the worst of these.

    Args:
        model: A temperature above 0 gives more different tasks.
        hosted: Limits and retries of a model behind a network. Default: as for `ExperienceModel`.
        num_proposals: Variations that the first stage writes.
    """

    def __init__(self, model: BaseChatModel, *, hosted: Hosted | None = None, num_proposals: int = 4) -> None:
        self.model, self.hosted, self.num_proposals = model, hosted or hosted_for(model), num_proposals
        structured = default_format(model) == "json_schema"
        self.asked = {prompt: bind_schema(model, schema) if structured else model for prompt, schema in SCHEMAS.items()}

    def __call__(self, task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
        """As `TaskGenerator`. Also None where the model does not answer or cannot be read, which is logged; raises
        `BudgetExceeded`."""
        with _logged(task.id):
            proposals = read_proposals(self._answer(PROPOSE, self.proposing(task, trajectories)))
            return self._selected(task, proposals, self._answer(SELECT, self.selecting(task, trajectories, proposals)))
        return None

    def proposing(self, task: Task, trajectories: Sequence[Trajectory]) -> list[BaseMessage]:
        """The prompt of the first stage, `task` first among the seed tasks."""
        seeds = {task.id: task} | {each.task.id: each.task for each in trajectories}
        shown = [_shown(seed, trajectories) for seed in seeds.values()]
        asked = {"seed_tasks": shown, "number": self.num_proposals, "tools": schemas(task)}
        return [SystemMessage(load_prompt(PROPOSE)), HumanMessage(encoded(asked))]

    def selecting(self, task: Task, trajectories: Sequence[Trajectory], proposals: Sequence[Proposal]) -> list[BaseMessage]:
        """The prompt of the second stage."""
        numbered = [{"number": number, **proposal._asdict()} for number, proposal in enumerate(proposals, 1)]
        asked = {"seed_task": _shown(task, trajectories), "variations": numbered}
        return [SystemMessage(load_prompt(SELECT)), HumanMessage(encoded(asked))]

    def _answer(self, prompt: str, messages: list[BaseMessage]) -> str:
        with unrecorded():
            model = self.asked[prompt]
            answer: AIMessage = self.hosted.ask(model, messages) if self.hosted else model.invoke(messages)
        return answer.text

    def _selected(self, task: Task, proposals: Sequence[Proposal], answer: str) -> Task | None:
        chosen, reason = read_selection(answer, len(proposals))
        if chosen == 0:
            return None
        proposal = proposals[chosen - 1]
        generated = {"generator": f"{name_of(self.model)}/{PROPOSE}", "why": f"{proposal.change}: {reason}"}
        return variation(task, proposal.task, rubric=proposal.rubric, generated=generated)


@contextmanager
def _logged(task_id: str) -> Iterator[None]:
    """What makes a variation fail is logged, and no reason to stop a training."""
    try:
        yield
    except (PredictionFailed, ModelUnavailable) as error:
        logger.warning("no variation of task %s: %s", task_id, error)


def _shown(task: Task, trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """A seed task with its rewards, and its best and worst episode in short."""
    ranked = sorted((each for each in trajectories if each.task.id == task.id), key=lambda each: each.reward)
    examples = [ranked[0], ranked[-1]][-min(len(ranked), _SHOWN_EPISODES) :] if ranked else []
    return {
        "task": first_observation(task),
        "rubric": task.metadata.get("rubric", ""),
        "rewards": [each.reward for each in ranked],
        "episodes": [
            {
                "reward": each.reward,
                "steps": [
                    {"action": step.action[:_SHOWN_CHARACTERS], "answer": step.next_observation[:_SHOWN_CHARACTERS]}
                    for step in each.steps[:_SHOWN_STEPS]
                ],
            }
            for each in examples
        ],
    }


def read_proposals(text: str) -> list[Proposal]:
    """Raises `PredictionFailed` unless the answer holds at least one variation, each with task, rubric and change."""
    found = json_object(text).get("tasks")
    if not isinstance(found, list) or not found:
        raise PredictionFailed("the answer has no 'tasks', a list of variations")
    proposals = []
    for each in found:
        texts = [each.get(name) for name in Proposal._fields] if isinstance(each, dict) else [None]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise PredictionFailed(f"the variation {str(each)[:200]} lacks one of {', '.join(Proposal._fields)}")
        proposals.append(Proposal(*(str(text).strip() for text in texts)))
    return proposals


def read_selection(text: str, number: int) -> tuple[int, str]:
    """The number chosen, 0 for none, and the reason; raises `PredictionFailed` for another number than 0 to `number`."""
    found = json_object(text)
    chosen = found.get("chosen")
    if not isinstance(chosen, int) or isinstance(chosen, bool) or not 0 <= chosen <= number:
        raise PredictionFailed(f"'chosen' is {chosen!r}; expected a number from 0 to {number}")
    return chosen, str(found.get("reason", ""))
