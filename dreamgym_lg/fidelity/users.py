"""Measures a dreamed user's errors on recorded conversations."""

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from dreamgym_lg.actions import is_answer, parse_call
from dreamgym_lg.dream.dream import Dream, ask
from dreamgym_lg.dream.goals import has_user_turns
from dreamgym_lg.dream.parts import Episode
from dreamgym_lg.dream.users import Goal, ModelUser, known_values, model_user, values
from dreamgym_lg.errors import PredictionFailed, UserFault
from dreamgym_lg.types import Trajectory

INVENTED, UNTOLD = "replies that tell what the user cannot know", "facts that were asked for"
EARLY, LATE = "conversations with something left to do", "conversations that are over"
AGAINST, EVADED = "replies that contradict the goal", "questions"


class UserCase(NamedTuple):
    """One case of a user's error."""

    by: str
    """The user's name."""
    kind: str
    wrong: bool
    example: str


async def user_cases(dream: Dream, trajectory: Trajectory) -> list[UserCase]:
    """The cases of a recorded conversation.

    There are none where no user replied, and in a dream whose user is no language model.

    By rule, of each reply: does it tell an id or amount that neither goal nor conversation holds; none of the goal's where the
    recorded user told some that are new; does it end while the agent really called a tool afterwards, and go on at the
    record's end. By the user's `judge`, where it has one: does it contradict the goal, and leave a question without answer.
    """
    user = model_user(dream.user)
    if user is None or not has_user_turns(trajectory) or trajectory.run.startswith("edited/"):
        return []
    positions = [number for number, step in enumerate(trajectory.steps) if is_answer(step.action)]
    by_reply = await asyncio.gather(*(_cases(dream, user, trajectory, position) for position in positions))
    return [case for cases in by_reply for case in cases]


async def _cases(dream: Dream, user: ModelUser, trajectory: Trajectory, position: int) -> list[UserCase]:
    step, goal = trajectory.steps[position], user.goal(trajectory.task)
    episode = dream.resume(trajectory.task, trajectory.steps[:position], prompt=trajectory.prompt).episode(step.action)
    fault, reply = None, None
    assert dream.user is not None
    try:
        reply = await ask(dream.user, "reply", str, episode)
    except UserFault as error:
        fault = error
    except PredictionFailed:
        reply = ""
    text = f"task {trajectory.task.id}: {step.action[:200]} -> {fault or (reply or 'the end')[:200]}"
    cases = [*_by_rule(trajectory, position, goal, episode, fault, reply), *await _by_judge(user, episode, fault, reply)]
    return [UserCase(dream.user.name, kind, wrong, text) for kind, wrong in cases]


def _by_rule(
    trajectory: Trajectory, position: int, goal: Goal, episode: Episode, fault: UserFault | None, reply: str | None
) -> Iterator[tuple[str, bool]]:
    """(kind, wrong) of one reply. Args: `fault`, of a reply that was refused; `reply`, None for the end."""
    step, later = trajectory.steps[position], trajectory.steps[position + 1 :]
    if not later:
        yield LATE, reply is not None or fault is not None
        return
    ends = reply is None and fault is None
    if any(parse_call(each.action) is not None for each in later):
        yield EARLY, ends
    if not ends:
        invents = fault is not None and fault.verdict is None
        yield INVENTED, invents or not values(reply or "") <= known_values(goal, episode)
    new_facts = values(step.next_observation) - known_values(Goal(goal=""), episode)
    if facts_of_goal := new_facts & known_values(goal, episode):
        yield UNTOLD, not facts_of_goal & values(reply or "")


async def _by_judge(user: ModelUser, episode: Episode, fault: UserFault | None, reply: str | None) -> list[tuple[str, bool]]:
    verdict = fault.verdict if fault is not None else await user.verdict(episode, reply) if reply and user.judge else None
    if verdict is None:  # the end, or a reply that was refused before its judge read it; one that says nothing evades
        return [(AGAINST, False), (EVADED, True)] if user.judge is not None and reply == "" else []
    return [(AGAINST, verdict.contradicts), (EVADED, not verdict.answers)]
