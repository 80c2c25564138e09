"""dreamgym-lg: train a LangGraph agent's policy in a dream, and prove the gain in the real environment."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dreamgym_lg.curriculum import Curriculum
from dreamgym_lg.dream import Dream, Model, ModelJudge, Recorded, References, Schemas, ScriptedUser, Verify
from dreamgym_lg.environment import Environment, check_environment
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.rollout import rollout
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Act, Segment, Step, StepResult, Task, Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.experiment.agent_world import AgentWorld
    from dreamgym_lg.experiment.experiment import Experiment
    from dreamgym_lg.experiment.settings import Settings
    from dreamgym_lg.experiment.world import World
    from dreamgym_lg.gym import DreamGym
    from dreamgym_lg.production.export import load_policy
    from dreamgym_lg.simulate import with_policy
    from dreamgym_lg.splits import split_tasks
    from dreamgym_lg.traces import load_traces

__all__ = [
    "Act",
    "AgentWorld",
    "Curriculum",
    "Dream",
    "DreamGym",
    "Environment",
    "Experiment",
    "Model",
    "ModelJudge",
    "Recorded",
    "References",
    "ReplayBuffer",
    "Schemas",
    "ScriptedUser",
    "Segment",
    "Settings",
    "Step",
    "StepResult",
    "Task",
    "TokenRecorder",
    "Trajectory",
    "Verify",
    "World",
    "check_environment",
    "load_policy",
    "load_traces",
    "rollout",
    "split_tasks",
    "with_policy",
]

_LATER = {
    "AgentWorld": "dreamgym_lg.experiment.agent_world",
    "DreamGym": "dreamgym_lg.gym",
    "Experiment": "dreamgym_lg.experiment.experiment",
    "Settings": "dreamgym_lg.experiment.settings",
    "World": "dreamgym_lg.experiment.world",
    "load_policy": "dreamgym_lg.production.export",
    "load_traces": "dreamgym_lg.traces",
    "split_tasks": "dreamgym_lg.splits",
    "with_policy": "dreamgym_lg.simulate",
}
"""What needs more of langchain is imported when it is first asked for: `import dreamgym_lg` stays quick."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
