"""dreamgym-lg: train a LangGraph agent's policy in a dream, and prove the gain in the real environment."""

from typing import TYPE_CHECKING, Any

from dreamgym_lg.curriculum.curriculum import Curriculum
from dreamgym_lg.environment import Environment, check_environment
from dreamgym_lg.experience.environment import DreamEnvironment
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Prediction, Segment, Step, StepResult, Task, Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.gym import DreamGym
    from dreamgym_lg.traces import load_traces

__all__ = [
    "Curriculum",
    "DreamEnvironment",
    "DreamGym",
    "Environment",
    "ExperienceModel",
    "Prediction",
    "ReplayBuffer",
    "Segment",
    "Step",
    "StepResult",
    "Task",
    "TokenRecorder",
    "Trajectory",
    "check_environment",
    "load_traces",
    "rollout",
]


def __getattr__(name: str) -> Any:
    """What needs more of langchain is imported when it is first asked for: `import dreamgym_lg` stays quick."""
    if name == "DreamGym":
        from dreamgym_lg.gym import DreamGym

        return DreamGym
    if name == "load_traces":
        from dreamgym_lg.traces import load_traces

        return load_traces
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
