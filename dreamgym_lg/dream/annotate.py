"""Reasoning of recorded episodes, written in hindsight by a chat model (paper, section 4).

The model reads a whole trajectory with its outcome. Its plan for each step (why the action leads to the observation) becomes
the step's reasoning; the plan and modes of the episode become `Trajectory.annotation`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from pydantic import BaseModel

from dreamgym_lg.dream.prompter import ask_until_read
from dreamgym_lg.dream.prompts import WrittenText, bind_form, json_prompt, read_form
from dreamgym_lg.errors import BudgetExceeded, ModelUnavailable, PredictionFailed
from dreamgym_lg.hosted import Hosted, hosted_for, name_of
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Source, Trajectory

PROMPT = "annotate-1"
RETRIES = 1
"""Further tries after an answer that cannot be read."""
OBSERVATION_CHARACTERS = 2000
"""Characters of each observation that are shown."""


class _Plan(BaseModel, extra="forbid"):
    step: int
    transition_plan: WrittenText


class _Annotation(BaseModel, extra="forbid", title="annotation"):
    """How a recorded episode went, and why each action led to what followed."""

    overall_plan: WrittenText
    success_mode: WrittenText
    failure_mode: WrittenText
    transition_plans: list[_Plan]


class Annotated(NamedTuple):
    """The result of `annotate`."""

    written: int
    """Number of trajectories whose reasoning was written."""
    skipped: int
    """Number of trajectories that had their reasoning before."""
    failed: Mapping[str, str]
    """RUN/ITERATION/TASK/INDEX -> the cause, of trajectories without reasoning. They are tried again next time."""


Annotate = Callable[..., Coroutine[Any, Any, Annotated]]
"""(replay_buffer, source=...) -> `Annotated`: `partial(annotate, model=...)` with further arguments, such as `hosted`."""


async def annotate(
    replay_buffer: ReplayBuffer, model: BaseChatModel, *, hosted: Hosted | None = None, source: Source | None = "offline"
) -> Annotated:
    """Let `model` write the reasoning of every recorded step of train tasks (`Step.reasoning`).

    Trajectories with reasoning are skipped, so that an interrupted call resumes. Model and prompt are recorded as metrics of
    the run `annotate`.

    Args:
        hosted: Limits and budget. Default: as for `Model`.
        source: Source of the trajectories; None for all.

    Raises `BudgetExceeded`, after storing the answers under way.
    """
    recorded = replay_buffer.trajectories(source=source, split="train", errors=False)
    trajectories = [trajectory for trajectory in recorded if trajectory.steps]
    waiting = [trajectory for trajectory in trajectories if not all(step.reasoning for step in trajectory.steps)]
    chat, hosted = bind_form(model, _Annotation), hosted_for(model, hosted, replay_buffer)
    slots = asyncio.Semaphore(64)  # prompts made ahead; the calls themselves are bounded by `Hosted`
    failed: dict[str, str] = {}
    stopped: list[BudgetExceeded] = []

    async def write(trajectory: Trajectory) -> None:
        async with slots:
            if stopped:
                return
            read = partial(read_annotation, steps=len(trajectory.steps))
            try:
                (plans, episode), _ = await ask_until_read(chat, conversation(trajectory), read, hosted=hosted, retries=RETRIES)
            except BudgetExceeded as error:
                stopped.append(error)
            except (PredictionFailed, ModelUnavailable) as error:
                played = f"{trajectory.run}/{trajectory.iteration}"
                failed[f"{played}/{trajectory.task.id}/{trajectory.rollout_index}"] = str(error)
            else:
                replay_buffer.set_reasoning(trajectory, plans, annotation=episode)

    replay_buffer.record_metrics("annotate", 0, {"version": f"{name_of(model)}/{PROMPT}"})
    await asyncio.gather(*map(write, waiting))
    if stopped:
        raise stopped[0]
    return Annotated(len(waiting) - len(failed), len(trajectories) - len(waiting), failed)


def conversation(trajectory: Trajectory) -> list[BaseMessage]:
    """The prompt: everything recorded is a value in one JSON object."""
    steps = [
        {
            "step": number,
            "observation": step.observation[:OBSERVATION_CHARACTERS],
            "action": step.action,
            "valid": step.valid,
            "reward": step.reward,
            "next_observation": step.next_observation[:OBSERVATION_CHARACTERS],
        }
        for number, step in enumerate(trajectory.steps, start=1)
    ]
    return json_prompt(PROMPT, {"task": trajectory.task.instruction, "success": trajectory.success, "steps": steps})


def read_annotation(text: str, steps: int) -> tuple[list[str], dict[str, str]]:
    """The plan of every step, and the episode's plan and modes. Raises `PredictionFailed` if one is missing."""
    answer = read_form(text, _Annotation)
    if (numbers := [plan.step for plan in answer.transition_plans]) != list(range(1, steps + 1)):
        raise PredictionFailed(f"'transition_plans' has the steps {str(numbers)[:200]}; expected 1 to {steps}, each once")
    plans = [plan.transition_plan for plan in answer.transition_plans]
    return plans, answer.model_dump(exclude={"transition_plans"})
