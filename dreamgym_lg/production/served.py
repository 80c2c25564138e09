"""An exported policy as `langgraph dev` serves it: the agent that it was trained for, or the policy alone as a chat.

The server is started in the exported folder, or the environment variable DREAMGYM_POLICY names it.
"""

import asyncio
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel import Pregel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.production.export import load_policy
from dreamgym_lg.production.manifest import MANIFEST
from dreamgym_lg.simulate import with_policy
from dreamgym_lg.simulate.loading import load_agent


def load_exported(folder: Path) -> Pregel:
    """The graph of an exported folder, without a checkpointer and a store: the server brings its own.

    Raises `ConfigurationError` as `load_policy` does, and if the agent's source cannot be loaded.
    """
    # its name reaches the server's clients, the way to it need not
    policy = load_policy(folder, name_or_path=folder.resolve().name)
    project = json.loads((folder / MANIFEST).read_text())["agent"]  # checked by now: hashing large weights takes its time
    if project is None:

        async def answer(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await policy.ainvoke(state["messages"])]}

        return StateGraph(MessagesState).add_node("policy", answer).add_edge(START, "policy").compile()
    source, _, name = project["path"].rpartition(":")
    graph = load_agent(f"{(folder / source).resolve()}:{name}" if source.endswith(".py") else project["path"])
    if not isinstance(graph, Pregel):
        raise ConfigurationError(f"{project['path']} is a {type(graph).__name__} and no compiled graph")
    served = with_policy(graph, policy, route=project["route"], pass_through=project["pass_through"])
    served.checkpointer = served.store = None
    return served


@cache
def _agent() -> Pregel:
    return load_exported(Path(os.environ.get("DREAMGYM_POLICY", ".")))


async def agent() -> Any:
    """The exported agent. The server asks for the graph at each run, and allows its loop no loading of models."""
    return await asyncio.to_thread(_agent)
