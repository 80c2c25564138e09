"""dreamgym-lg: train a LangGraph agent in a dream, and prove the gain in reality."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dreamgym_lg.environment import Environment, check_environment
from dreamgym_lg.errors import DreamGymError
from dreamgym_lg.replay import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.dream import (
        Answer,
        Dream,
        Episode,
        Model,
        ModelJudge,
        Recorded,
        References,
        Schemas,
        ScriptedUser,
        Verdict,
        Verify,
    )
    from dreamgym_lg.experiment.experiment import Experiment
    from dreamgym_lg.experiment.settings import Settings
    from dreamgym_lg.experiment.world import World
    from dreamgym_lg.graphs.episode import create_episode_graph
    from dreamgym_lg.gym import DreamGym
    from dreamgym_lg.hosted import Hosted
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
    from dreamgym_lg.production.export import load_policy
    from dreamgym_lg.simulate import with_policy
    from dreamgym_lg.splits import split_tasks
    from dreamgym_lg.traces import load_traces

__all__ = [
    "Answer",
    "Dream",
    "DreamGym",
    "DreamGymError",
    "Environment",
    "Episode",
    "Experiment",
    "Hosted",
    "LocalChatModel",
    "Model",
    "ModelJudge",
    "Recorded",
    "References",
    "ReplayBuffer",
    "Schemas",
    "ScriptedUser",
    "Settings",
    "Step",
    "Task",
    "Trajectory",
    "Verdict",
    "Verify",
    "World",
    "check_environment",
    "create_episode_graph",
    "load_policy",
    "load_traces",
    "split_tasks",
    "with_policy",
]

_LATER = {
    **dict.fromkeys(("Answer", "Dream", "Episode", "Model", "ModelJudge", "Recorded", "References"), "dreamgym_lg.dream"),
    **dict.fromkeys(("Schemas", "ScriptedUser", "Verdict", "Verify"), "dreamgym_lg.dream"),
    "DreamGym": "dreamgym_lg.gym",
    "Experiment": "dreamgym_lg.experiment.experiment",
    "Hosted": "dreamgym_lg.hosted",
    "LocalChatModel": "dreamgym_lg.integrations.transformers.chat_model",
    "Settings": "dreamgym_lg.experiment.settings",
    "World": "dreamgym_lg.experiment.world",
    "load_policy": "dreamgym_lg.production.export",
    "create_episode_graph": "dreamgym_lg.graphs.episode",
    "load_traces": "dreamgym_lg.traces",
    "split_tasks": "dreamgym_lg.splits",
    "with_policy": "dreamgym_lg.simulate",
}
"""Names imported at their first use. They need more of langchain, or torch: `import dreamgym_lg` stays quick."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
