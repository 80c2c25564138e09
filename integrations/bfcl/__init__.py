"""BFCL multi-turn (Patil et al., 2025): real stateful Python APIs as LangChain tools behind an ordinary agent graph.

`apis` holds the APIs of an entry, `agent` the graph, `scripted_policies` offline trajectories.
"""

from dreamgym_lg.integrations.bfcl.agent import arun_turns, create_agent_graph, run_turns
from dreamgym_lg.integrations.bfcl.apis import BFCLApis, BFCLEnvironment, check_call
from dreamgym_lg.integrations.bfcl.data import CATEGORIES, ground_truth, load_tasks
from dreamgym_lg.integrations.bfcl.scripted_policies import offline_trajectories

__all__ = [
    "CATEGORIES",
    "BFCLEnvironment",
    "BFCLApis",
    "arun_turns",
    "check_call",
    "create_agent_graph",
    "ground_truth",
    "load_tasks",
    "offline_trajectories",
    "run_turns",
]
