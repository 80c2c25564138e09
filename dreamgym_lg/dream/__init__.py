"""The dream: responders answer tool calls, a user replies, judges decide the outcome; one loop steps them."""

from dreamgym_lg.dream.dream import Dream, DreamEnvironment
from dreamgym_lg.dream.judges import ModelJudge, Verify
from dreamgym_lg.dream.model import Model
from dreamgym_lg.dream.parts import Answer, Episode, Judge, Responder, User, Verdict
from dreamgym_lg.dream.recorded import Recorded, References
from dreamgym_lg.dream.schemas import Schemas
from dreamgym_lg.dream.users import ScriptedUser
from dreamgym_lg.dream.usual import usual_dream

__all__ = [
    "Answer",
    "Dream",
    "DreamEnvironment",
    "Episode",
    "Judge",
    "Model",
    "ModelJudge",
    "Recorded",
    "References",
    "Responder",
    "Schemas",
    "ScriptedUser",
    "User",
    "Verdict",
    "Verify",
    "usual_dream",
]
