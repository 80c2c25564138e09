"""Agents as users write them, to run a simulation against. No file here imports the library under test.

`import zoo` works in every test of tests/simulate: its conftest.py puts that folder on the path.
"""

from importlib.util import find_spec

from zoo.asking import KINDS as ASKING
from zoo.base import Built, Kind, World, signed, view
from zoo.calling import KINDS as CALLING
from zoo.graphs import KINDS as GRAPHS
from zoo.running import KINDS as RUNNING
from zoo.states import KINDS as STATES
from zoo.tooling import KINDS as TOOLING
from zoo.toolkits import KINDS as TOOLKITS
from zoo.workers import KINDS as WORKERS

KINDS: list[Kind] = [*GRAPHS, *STATES, *RUNNING, *WORKERS, *CALLING, *ASKING, *TOOLING, *TOOLKITS]
"""Every kind whose packages are installed: langgraph alone, langchain's agents, and those of further packages."""

if find_spec("langchain") and find_spec("deepagents"):
    from zoo.agents import KINDS as AGENTS
    from zoo.middleware import KINDS as MIDDLEWARE

    KINDS += [*AGENTS, *MIDDLEWARE]
    if find_spec("langgraph_supervisor") and find_spec("langgraph_swarm") and find_spec("langchain_mcp_adapters"):
        from zoo.packages import KINDS as PACKAGES

        KINDS += PACKAGES

RACING = ("send_fan_out", "commands_that_send", "batch_of_runs", "thread_pool", "several_questions_at_once")
"""Kinds in which threads act at once: whose call comes first is open, so a world must answer all the same."""

__all__ = ["KINDS", "RACING", "Built", "Kind", "World", "signed", "view"]
