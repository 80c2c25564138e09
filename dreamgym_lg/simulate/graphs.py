"""Graphs: an episode runs twins of them that share everything but caches, checkpoints and the store.

A node cache would replay old actions; a production checkpointer or store would be written to.
"""

import copy
import json
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from pydantic_core import to_jsonable_python

from dreamgym_lg.actions import render_call
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.simulate.context import Method, dispatch, subclasses

if TYPE_CHECKING:
    from dreamgym_lg.simulate.episode import Episode

METHODS = (
    "stream", "astream", "get_state", "aget_state", "get_state_history", "aget_state_history", "bulk_update_state",
    "abulk_update_state", "update_state", "aupdate_state",
)  # fmt: skip
"""All else that a graph offers ends in one of these."""


def install() -> None:
    for cls in subclasses(Pregel):
        for name in METHODS:
            if cls is Pregel or name in cls.__dict__:
                dispatch(cls, name, _on_twin)


def _on_twin(episode: "Episode", original: Method, graph: Pregel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return original(episode.twin(graph), *args, **kwargs)


def create_twin(episode: "Episode", graph: Pregel) -> Pregel:
    """A copy of the graph without cache, with the episode's own checkpointer and store where it had any."""
    twin = copy.copy(graph)
    twin.cache = None
    twin.config = {**(graph.config or {}), "recursion_limit": episode.recursion_limit}
    if isinstance(graph.checkpointer, BaseCheckpointSaver):
        twin.checkpointer = episode.checkpointers.setdefault(id(graph.checkpointer), InMemorySaver())
    if graph.store is not None:
        twin.store = episode.stores.setdefault(id(graph.store), _store(graph.store))
    names = episode.simulate_nodes & set(graph.nodes)
    if names:
        twin.nodes = {name: _dreamed(episode, name, node) if name in names else node for name, node in graph.nodes.items()}
    return twin


def _store(real: BaseStore) -> InMemoryStore:
    """A store of the episode's own: with what an in-memory one holds, else empty, for reading it would reach a server."""
    own = InMemoryStore(index=real.index_config) if isinstance(real, InMemoryStore) else InMemoryStore()
    if isinstance(real, InMemoryStore):
        own._data.update({namespace: dict(items) for namespace, items in real._data.items()})
        own._vectors.update({namespace: dict(items) for namespace, items in real._vectors.items()})
    return own


def _dreamed(episode: "Episode", name: str, node: Any) -> Any:
    """A node whose plain code is replaced by the environment: its input is the action, its answer the state update (JSON)."""

    def action(state: Any) -> str:
        return render_call(f"node:{name}", to_jsonable_python({"state": state}, fallback=str))

    def ask(state: Any) -> Any:
        return episode.play(action(state), None, lambda answer: _update(name, answer))[1]

    async def aask(state: Any) -> Any:
        return (await episode.aplay(action(state), None, lambda answer: _update(name, answer)))[1]

    twin = copy.copy(node)
    twin.__dict__.pop("node", None)  # cached from the real body
    twin.__dict__.pop("flat_writers", None)
    twin.bound = RunnableLambda(ask, aask)
    return twin


def _update(name: str, answer: str) -> dict[str, Any]:
    """The state update that the environment answers for a node. Raises `PredictionFailed` if it is no JSON object."""
    try:
        update = json.loads(answer)
    except ValueError:
        update = None
    if not isinstance(update, dict):
        raise PredictionFailed(
            f"node {name!r} is simulated; its answer must be a JSON object of state keys, got {answer[:120]!r}"
        )
    return update
