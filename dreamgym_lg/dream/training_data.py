"""Training data of a local experience model: recorded episodes as the conversations that it should have held."""

from langchain_core.messages import BaseMessage

from dreamgym_lg.actions import is_answer
from dreamgym_lg.dream.dream import Dream
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


async def judge_conversations(dream: Dream, trajectory: Trajectory) -> list[list[BaseMessage]]:
    """A recorded episode as the `ModelJudge` of `dream` should have judged it.

    It is judged twice where the prompts differ: with the traces of its task, and as of a new task. What an earlier judge
    decides is left out. Empty without a `ModelJudge`, and for an episode that does not end with a tool agent's message.
    """
    place = next((number for number, judge in enumerate(dream.judges) if isinstance(judge, ModelJudge)), None)
    if place is None or not ends_with_message(trajectory):
        return []
    judge, earlier = dream.judges[place], Dream((), judges=dream.judges[:place])
    assert isinstance(judge, ModelJudge)
    *steps, last = trajectory.steps
    outcome = "it completes the task" if trajectory.success else "it fails the task"
    verdict = Verdict(float(trajectory.success), trajectory.success, last.reasoning or outcome)
    prompts = dict[tuple[str, ...], list[BaseMessage]]()
    for own_traces in (True, False):
        episode = Episode(task=trajectory.task, steps=steps, action=last.action, own_traces=own_traces)
        if (await earlier.judge(episode))[0] is None:
            messages = judge.messages(episode)
            prompts[tuple(message.text for message in messages)] = messages
    return [[*messages, judge.answer(verdict)] for messages in prompts.values()]


def ends_with_message(trajectory: Trajectory) -> bool:
    """Whether it is a tool agent's episode that ends with a message, by which it is judged."""
    return is_tool_task(trajectory.task) and bool(trajectory.steps) and is_answer(trajectory.steps[-1].action)
