"""Agents as users write them, to run a simulation against. No file here imports the library under test.

`import zoo` works in every test of tests/simulate: its conftest.py puts that folder on the path.
"""

from importlib.util import find_spec

from zoo.base import Built, Kind, World, signed, view
from zoo.calling import KINDS as CALLING
from zoo.graphs import KINDS as GRAPHS
from zoo.running import KINDS as RUNNING
from zoo.tooling import KINDS as TOOLING

KINDS: list[Kind] = [*GRAPHS, *RUNNING, *CALLING, *TOOLING]
"""Every kind whose packages are installed: langgraph alone, and langchain's and deepagents' agents."""

if find_spec("langchain") and find_spec("deepagents"):
    from zoo.agents import KINDS as AGENTS

    KINDS += AGENTS

__all__ = ["KINDS", "Built", "Kind", "World", "signed", "view"]
