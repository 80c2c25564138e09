"""BFCL multi-turn (Patil et al., 2025): real stateful Python APIs as LangChain tools behind an ordinary agent graph.

`world` holds an entry's APIs, `agent` the graph, `environment` the same in text, `behaviour` its offline trajectories.
"""

from dreamgym_lg.integrations.bfcl.agent import arun_turns, create_agent_graph, run_turns
from dreamgym_lg.integrations.bfcl.data import CATEGORIES, ground_truth, load_tasks
from dreamgym_lg.integrations.bfcl.environment import BFCLEnvironment
from dreamgym_lg.integrations.bfcl.scripted_policies import offline_trajectories
from dreamgym_lg.integrations.bfcl.world import BFCLWorld, check_call

__all__ = [
    "CATEGORIES",
    "BFCLEnvironment",
    "BFCLWorld",
    "arun_turns",
    "check_call",
    "create_agent_graph",
    "ground_truth",
    "load_tasks",
    "offline_trajectories",
    "run_turns",
]
