"""Training data of an experience model: recorded episodes as the conversations that it should have held."""

from langchain_core.messages import BaseMessage

from dreamgym_lg.environment import CheckAction
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experience.predictions import Exchange, in_hindsight
from dreamgym_lg.types import Trajectory


def recorded_exchanges(
    experience: ExperienceModel, trajectory: Trajectory, check_action: CheckAction | None = None
) -> list[Exchange]:
    """What `experience` should have answered in a recorded episode.

    Actions that `check_action` refuses never reach an experience model, neither here nor in the dream.
    """
    seen = [str(trajectory.task.metadata.get("observation", ""))]
    exchanges = []
    for step in trajectory.steps:
        if check_action is None or check_action(step.action, seen) is None:
            right = in_hindsight(step, success=trajectory.success)
            found = experience.demonstrations(step.observation, step.action, trajectory.task)
            exchanges.append(Exchange(step.action, right, found))
        seen.append(step.next_observation)
    return exchanges


def to_conversation(
    experience: ExperienceModel, trajectory: Trajectory, check_action: CheckAction | None = None
) -> list[BaseMessage]:
    """A trajectory as the conversation `experience` should have held, for its training; empty if it was asked nothing."""
    exchanges = recorded_exchanges(experience, trajectory, check_action)
    return experience.messages(trajectory.task, exchanges, "", ())[:-1] if exchanges else []
