"""The dream: responders answer tool calls, a user replies, judges decide the outcome."""

from dreamgym_lg.dream.dream import Dream, DreamEnvironment
from dreamgym_lg.dream.goals import write_goals
from dreamgym_lg.dream.judges import ModelJudge, Verify
from dreamgym_lg.dream.model import Model
from dreamgym_lg.dream.parts import Answer, Episode, Judge, Responder, User, Verdict
from dreamgym_lg.dream.recorded import Recorded, References
from dreamgym_lg.dream.relative import RelativeJudge
from dreamgym_lg.dream.schemas import Schemas
from dreamgym_lg.dream.trace_index import TraceIndex
from dreamgym_lg.dream.users import Goal, ModelUser, RecordedUser, ScriptedUser, UntilHandOver, recorded_user

__all__ = [
    "Answer",
    "Dream",
    "DreamEnvironment",
    "Episode",
    "Goal",
    "Judge",
    "Model",
    "ModelJudge",
    "ModelUser",
    "Recorded",
    "RecordedUser",
    "References",
    "RelativeJudge",
    "Responder",
    "Schemas",
    "ScriptedUser",
    "UntilHandOver",
    "User",
    "Verdict",
    "Verify",
    "recorded_user",
    "usual_dream",
    "write_goals",
]


def usual_dream(model: Model, index: TraceIndex | None = None, *, user: User | None = None, relative: bool = False) -> Dream:
    """The default dream, of recorded answers and an experience model.

    Schemas, recorded answers and then the model answer; recorded successes and then the model judge.

    Args:
        index: Index of the real traces, with the agent's tools, which validate arguments. Default: an index of the model's
            replay buffer; without a buffer, no traces answer or judge.
        relative: True to let the model compare the episodes of a group (`RelativeJudge`) in place of judging each.
    """
    if index is None and model.replay_buffer is not None:
        index = TraceIndex(model.replay_buffer)
    if index is None:
        return Dream([Schemas(), model], user, [RelativeJudge(model) if relative else ModelJudge(model)])
    references = References(index, conversations=user is not None)
    judge = RelativeJudge(model) if relative else ModelJudge(model, references=references)
    return Dream([Schemas(index.tools), Recorded(index), model], user, [references, judge])
