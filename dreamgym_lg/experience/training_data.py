"""Training data of an experience model: recorded episodes as the conversations that it should have held."""

from collections.abc import Sequence

from langchain_core.messages import AIMessage, BaseMessage

from dreamgym_lg.environment import CheckAction, unrefused_steps
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.notes import notes_of, read_notes, without_notes
from dreamgym_lg.experience.predictions import Exchange, in_hindsight
from dreamgym_lg.experience.prompt_formats import is_tool_task
from dreamgym_lg.experience.rules import answer_reasoning, call_reasoning, played
from dreamgym_lg.types import Prediction, Step, Trajectory


def recorded_exchanges(
    experience: ExperienceModel,
    trajectory: Trajectory,
    check_action: CheckAction | None = None,
) -> list[Exchange]:
    """What `experience` should have answered in a recorded episode.

    Actions that `check_action` refuses never reach an experience model, neither here nor in the dream. A tool agent's steps
    without a reasoning of their own get one by rules.
    """
    exchanges: list[Exchange] = []
    for _, step in unrefused_steps(trajectory, check_action):
        right = in_hindsight(step, success=trajectory.success)
        found = experience.demonstrations(step.observation, step.action, trajectory.task, exchanges)
        if is_tool_task(trajectory.task) and not step.reasoning:
            right = _reasoned(right, experience, trajectory, exchanges, step, found)
        exchanges.append(Exchange(step.action, right, found))
    return exchanges


def _reasoned(
    right: Prediction,
    experience: ExperienceModel,
    trajectory: Trajectory,
    exchanges: Sequence[Exchange],
    step: Step,
    found: Sequence[Step],
) -> Prediction:
    task, writes, history = trajectory.task, experience.writes, [played(exchange) for exchange in exchanges]
    if step.terminated:
        claims = experience.untold(task, exchanges, step.action)
        reasoning = answer_reasoning(task, history, found, claims, success=trajectory.success, writes=writes)
    else:
        reasoning = call_reasoning(task, history, step, writes)
    return right._replace(reasoning=reasoning or right.reasoning)


def to_conversation(
    experience: ExperienceModel,
    trajectory: Trajectory,
    check_action: CheckAction | None = None,
) -> list[BaseMessage]:
    """A trajectory as the conversation `experience` should have held, for its training; empty if it was asked nothing.

    Of one that is shown a part of an episode (`ExperienceModel.shown`), its last question and the answer.
    """
    exchanges = recorded_exchanges(experience, trajectory, check_action)
    if experience.shown is None:
        return experience.messages(trajectory.task, exchanges, "", ())[:-1] if exchanges else []
    for position, (action, right, found) in reversed(list(enumerate(exchanges))):
        if experience.asked(trajectory.task, history := exchanges[:position], action):
            answer = AIMessage(experience.prompt_format.answer(right))
            return [*experience.messages(trajectory.task, history, action, found), answer]
    return []


def notes_conversation(experience: ExperienceModel, trajectory: Trajectory) -> list[BaseMessage]:
    """The conversation in which `experience` should have written the notes of this episode, which has some."""
    notes = read_notes(notes_of(trajectory.task) or "")
    asked = experience.notes_messages(without_notes(trajectory.task))
    return [*asked, AIMessage(experience.prompt_format.answer_notes(notes))]
