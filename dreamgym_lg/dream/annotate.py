"""Reasoning traces for recorded episodes, written in hindsight by a chat model (paper, section 4).

Each trajectory is read whole, its outcome known, and answered with an overall plan, a success mode, a failure mode and one
transition plan a step: why this action leads to this observation. The plans become the steps' reasoning, on which the
experience model is trained; the rest makes the annotator think the episode through first, and is kept beside it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from dreamgym_lg.dream.prompter import ask_until_read
from dreamgym_lg.dream.prompts import bind_schema, default_format, encoded, json_object, load_prompt
from dreamgym_lg.errors import BudgetExceeded, ModelUnavailable, PredictionFailed
from dreamgym_lg.hosted.chat_model import name_of
from dreamgym_lg.hosted.hosted import Hosted, hosted_for
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Source, Split, Trajectory

PROMPT = "annotate-1"

SCHEMA: Mapping[str, Any] = {
    "title": "annotation",
    "description": "How a recorded episode went, and why each action led to what followed.",
    "type": "object",
    "properties": {
        "overall_plan": {"type": "string"},
        "success_mode": {"type": "string"},
        "failure_mode": {"type": "string"},
        "transition_plans": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"step": {"type": "integer"}, "transition_plan": {"type": "string"}},
                "required": ["step", "transition_plan"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["overall_plan", "success_mode", "failure_mode", "transition_plans"],
    "additionalProperties": False,
}


class Annotation(NamedTuple):
    """One answer of the annotator."""

    plans: list[str]
    """The transition plan of every step."""
    episode: Mapping[str, str]
    """Its `overall_plan`, `success_mode` and `failure_mode`."""


class Annotated(NamedTuple):
    """The result of `annotate`."""

    written: int
    """Trajectories whose steps have their reasoning now."""
    skipped: int
    """Trajectories that had it before."""
    failed: Mapping[str, str]
    """Trajectories without it, by task and index, each with its cause; they are tried again next time."""


class Annotate(Protocol):
    """`partial(annotate, model=...)`, with its further arguments, such as a budget (`hosted`)."""

    def __call__(self, replay_buffer: ReplayBuffer, *, source: Source | None) -> Coroutine[Any, Any, Annotated]: ...


async def annotate(
    replay_buffer: ReplayBuffer,
    model: BaseChatModel,
    *,
    hosted: Hosted | None = None,
    source: Source | None = "offline",
    split: Split | None = "train",
    run: str | None = None,
    limit: int | None = None,
    retries: int = 1,
    observation_characters: int = 2000,
    on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
) -> Annotated:
    """Let `model` write the reasoning of every recorded step (`Step.reasoning`).

    Its plan and modes of a whole episode are the `Trajectory.annotation`. Trajectories with reasoning are skipped, so that a
    stopped call goes on where it was. Model and prompt are recorded as metrics of the run `annotate`.

    Args:
        hosted: Limits and budget. Default: as for `Model`.
        source, split, run: Of the trajectories.
        limit: Trajectories at most.
        retries: Further tries after an answer that cannot be read.
        observation_characters: Characters of each observation that are shown.

    Raises `BudgetExceeded` once the answers under way are stored.
    """
    recorded = replay_buffer.trajectories(source=source, split=split, run=run, errors=False)
    trajectories = [trajectory for trajectory in recorded if trajectory.steps]
    waiting = [trajectory for trajectory in trajectories if not all(step.reasoning for step in trajectory.steps)]
    chat = bind_schema(model, SCHEMA) if default_format(model) == "json_schema" else model
    hosted = hosted_for(model, hosted, replay_buffer)
    slots = asyncio.Semaphore(64)  # prompts made ahead; the calls themselves are bounded by `Hosted`
    failed: dict[str, str] = {}
    stopped: list[BudgetExceeded] = []

    async def write(trajectory: Trajectory) -> None:
        async with slots:
            if stopped:
                return
            prompt = conversation(trajectory, observation_characters)
            read = partial(read_annotation, steps=len(trajectory.steps))
            try:
                annotation, _ = await ask_until_read(chat, prompt, read, hosted=hosted, retries=retries)
            except BudgetExceeded as error:
                stopped.append(error)
            except (PredictionFailed, ModelUnavailable) as error:
                failed[f"{trajectory.task.id}/{trajectory.rollout_index}"] = str(error)
            else:
                replay_buffer.set_reasoning(trajectory, annotation.plans, annotation=annotation.episode)
                on_trajectory(trajectory)

    replay_buffer.record_metrics("annotate", 0, {"version": f"{name_of(model)}/{PROMPT}"})
    await asyncio.gather(*map(write, waiting[:limit]))
    if stopped:
        raise stopped[0]
    return Annotated(len(waiting[:limit]) - len(failed), len(trajectories) - len(waiting), failed)


def conversation(trajectory: Trajectory, observation_characters: int = 2000) -> list[BaseMessage]:
    """The prompt: everything recorded is a value in one JSON object."""
    steps = [
        {
            "step": number,
            "observation": step.observation[:observation_characters],
            "action": step.action,
            "valid": step.valid,
            "reward": step.reward,
            "next_observation": step.next_observation[:observation_characters],
        }
        for number, step in enumerate(trajectory.steps, start=1)
    ]
    episode = {"task": trajectory.task.instruction, "success": trajectory.success, "steps": steps}
    return [SystemMessage(load_prompt(PROMPT)), HumanMessage(encoded(episode))]


def read_annotation(text: str, steps: int) -> Annotation:
    """Raises `PredictionFailed` unless the answer has the paper's form, complete, with a plan for each of `steps`."""
    answer = json_object(text)
    if answer.keys() != SCHEMA["properties"].keys():
        raise PredictionFailed(f"the answer has the keys {sorted(answer)}; expected {', '.join(SCHEMA['properties'])}")
    plans = answer["transition_plans"]
    if not isinstance(plans, list) or not all(isinstance(plan, dict) for plan in plans):
        raise PredictionFailed("'transition_plans' is no list of objects")
    episode = {key: answer[key] for key in ("overall_plan", "success_mode", "failure_mode")}
    texts = [*episode.values(), *(plan.get("transition_plan") for plan in plans)]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise PredictionFailed("a plan or mode is missing, empty or no text")
    if (numbers := [plan.get("step") for plan in plans]) != list(range(1, steps + 1)):
        raise PredictionFailed(f"'transition_plans' has the steps {str(numbers)[:200]}; expected 1 to {steps}, each once")
    return Annotation([plan["transition_plan"].strip() for plan in plans], {key: text.strip() for key, text in episode.items()})
