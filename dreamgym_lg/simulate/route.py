"""Which calls of a graph's models the policy answers: those of nodes named, or those that a function picks."""

from collections.abc import Callable, Collection
from typing import Any

from langgraph.pregel import Pregel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate.context import Call
from dreamgym_lg.simulate.object_graph import reachable

Route = Callable[[Call], bool] | Collection[str]
"""The calls that are the policy's: a function of the `Call`, or names of nodes, of which one counts with all that it runs, a
subgraph of its own for instance, and names of `create_agent`'s agents."""


def goes_to_policy(route: Route | None, call: Call) -> bool:
    """Whether the policy answers this call. Without a route it answers all."""
    if route is None or callable(route):
        return route is None or bool(route(call))
    path = (part.partition(":")[0] for part in call.namespace.split("|"))
    return not {call.node, call.agent, *path}.isdisjoint(route)


def check_route(graph: Any, route: Route | None) -> None:
    """Raise `ConfigurationError` for a name that is no node of `graph` or its subgraphs, and none of its agents."""
    if route is None or callable(route):
        return
    if isinstance(route, str) or not route:
        raise ConfigurationError(f"route={route!r}: give a list of names of nodes, or a function of a Call")
    graphs = [each for each in reachable(graph) if isinstance(each, Pregel)]
    known = {name for each in graphs for name in each.nodes} - {"__start__"}
    known |= {each.name for each in graphs if each.name != "LangGraph"}
    for name in sorted(set(route) - known):
        raise ConfigurationError.unknown("node in route=:", name, known)
