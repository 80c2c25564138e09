"""Training data of a local experience model: recorded episodes as the conversations that it should have held."""

from collections.abc import Sequence

from langchain_core.messages import BaseMessage

from dreamgym_lg.actions import is_answer
from dreamgym_lg.dream.judges import ModelJudge
from dreamgym_lg.dream.model import Model
from dreamgym_lg.dream.parts import Episode, Verdict
from dreamgym_lg.tasks import is_tool_task
from dreamgym_lg.types import Trajectory


def responder_conversation(model: Model, trajectory: Trajectory) -> list[BaseMessage]:
    """A recorded episode as `model` should have answered it; empty if it was asked nothing.

    Of a tool agent, its calls alone: messages go to the user or the judge.
    """
    steps = list(trajectory.steps)
    if is_tool_task(trajectory.task) and steps and is_answer(steps[-1].action):
        steps.pop()
    return model.conversation(trajectory.task, steps, success=trajectory.success) if steps else []


def judge_conversation(judge: ModelJudge, trajectory: Trajectory) -> list[BaseMessage]:
    """A recorded episode as `judge` should have judged it; empty unless it ends with a tool agent's message."""
    if not ends_with_message(trajectory):
        return []
    *steps, last = trajectory.steps
    episode = Episode(task=trajectory.task, steps=steps, action=last.action, own_traces=False)
    outcome = "it completes the task" if trajectory.success else "it fails the task"
    verdict = Verdict(float(trajectory.success), trajectory.success, last.reasoning or outcome)
    return [*judge.messages(episode), judge.answer(verdict)]


def conversations(model: Model, judge: ModelJudge, trajectories: Sequence[Trajectory]) -> list[list[BaseMessage]]:
    """All conversations that these episodes teach, those without an answer left out."""
    model.retrieve(trajectories)
    pairs = ((responder_conversation(model, each), judge_conversation(judge, each)) for each in trajectories)
    return [conversation for pair in pairs for conversation in pair if conversation]


def ends_with_message(trajectory: Trajectory) -> bool:
    """Whether it is a tool agent's episode that ends with a message, by which it is judged."""
    return is_tool_task(trajectory.task) and bool(trajectory.steps) and is_answer(trajectory.steps[-1].action)
