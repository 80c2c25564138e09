"""dreamgym-lg: train a LangGraph agent's policy in a dream, and prove the gain in the real environment."""

from dreamgym_lg.curriculum import Curriculum
from dreamgym_lg.environment import Environment, check_environment
from dreamgym_lg.experience import DreamEnvironment, ExperienceModel
from dreamgym_lg.policy import TokenRecorder
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.types import Prediction, Segment, Step, StepResult, Task, Trajectory

__all__ = [
    "Curriculum",
    "DreamEnvironment",
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
    "rollout",
]
