"""Goals of recorded users, written in hindsight from their messages."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from langchain_core.language_models import BaseChatModel
from pydantic import BaseModel, StrictStr

from dreamgym_lg.actions import is_answer
from dreamgym_lg.dream.prompter import Prompter
from dreamgym_lg.dream.prompts import encoded, json_prompt, read_form
from dreamgym_lg.dream.users import Goal, transcript, values
from dreamgym_lg.errors import ModelUnavailable, PredictionFailed
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Trajectory

PROMPT = "goal-1"


class Goals(NamedTuple):
    """The result of `write_goals`."""

    written: int
    """Number of tasks that got a goal."""
    failed: dict[str, str]
    """Id of each task without a goal -> the cause. They are tried again next time."""


class _Goal(BaseModel, extra="forbid", title="goal"):
    goal: StrictStr
    facts: dict[str, str | int | float | bool]
    persona: StrictStr


async def write_goals(
    replay_buffer: ReplayBuffer, model: BaseChatModel | str | None = None, *, hosted: Hosted | None = None
) -> Goals:
    """Write the missing `Task.goal` of recorded conversations, from their best episodes.

    All episodes of a task have the same goal then. A call that was interrupted resumes.

    Args:
        model: A chat model that answers at temperature 0, or its name. None: the user's first message becomes the goal, the
            later ones its facts.
        hosted: As for `Model`.

    Raises `BudgetExceeded`; goals written before are kept.
    """
    best, failed = dict[str, Trajectory](), dict[str, str]()
    recorded = replay_buffer.trajectories(source="offline", errors=False)
    for each in (each for each in recorded if not each.task.goal and has_user_turns(each)):
        if each.success > best.setdefault(each.task.id, each).success:
            best[each.task.id] = each
    prompter, slots = Prompter(model, hosted=hosted, replay_buffer=replay_buffer), asyncio.Semaphore(64)

    async def write(trajectory: Trajectory) -> None:
        async with slots:
            try:
                goal = await _ask(prompter, trajectory) if model is not None else verbatim_goal(trajectory)
            except (PredictionFailed, ModelUnavailable) as error:
                failed[trajectory.task.id] = str(error)
            else:
                replay_buffer.add_tasks([replace(trajectory.task, goal=goal.side)])

    await asyncio.gather(*map(write, best.values()))
    return Goals(len(best) - len(failed), failed)


def has_user_turns(trajectory: Trajectory) -> bool:
    """True if a user replied to a message of the agent."""
    return any(is_answer(step.action) for step in trajectory.steps[:-1])


def verbatim_goal(trajectory: Trajectory) -> Goal:
    """A recorded user's messages as a goal: the first one, with the others as facts."""
    first, *later = transcript(trajectory.task, trajectory.steps[:-1])[::2]
    return Goal(goal=first, facts={"said": later})


async def _ask(prompter: Prompter, trajectory: Trajectory) -> Goal:
    turns = transcript(trajectory.task, trajectory.steps)
    return await prompter.ask(json_prompt(PROMPT, {"conversation": turns}), partial(_read, values(*turns)), prompt=PROMPT)


def _read(known_values: frozenset[str], text: str) -> Goal:
    """The goal in an answer. Raises `PredictionFailed` for another form, and for values not in the conversation."""
    goal = Goal(**read_form(text, _Goal).model_dump())
    if invented := values(encoded(goal.side)) - known_values:
        raise PredictionFailed(f"the goal holds {', '.join(sorted(invented))}, which nobody said in the conversation")
    return goal
