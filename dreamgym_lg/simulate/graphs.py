"""Runs copies ("twins") of graphs in an episode, with its own checkpoints and stores.

A node cache would replay old actions; a production checkpointer or store would be written to.
"""

import contextlib
import copy
import json
import threading
from collections.abc import Collection
from functools import partial
from typing import Any

from langchain_core.runnables import Runnable, RunnableLambda
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.pregel import Pregel
from langgraph.pregel._read import PregelNode
from langgraph.store.base import BaseStore, PutOp
from langgraph.store.memory import InMemoryStore
from pydantic_core import to_jsonable_python

from dreamgym_lg.actions import render_call
from dreamgym_lg.errors import PredictionFailed
from dreamgym_lg.replay.retrieval import DIMENSION, phi
from dreamgym_lg.simulate.context import Args, Kwargs, Method, answering_episode, dispatch, subclasses
from dreamgym_lg.simulate.episode import AgentEpisode
from dreamgym_lg.user_code import first_line

METHODS = (
    *("stream", "astream", "get_state", "aget_state", "get_state_history", "aget_state_history"),
    *("bulk_update_state", "abulk_update_state", "update_state", "aupdate_state"),
)
"""Every other method of a graph calls one of these."""

RECURSION_LIMIT = 50
_UNLIMITED = 9_999
"""The limit that `create_agent` and deepagents set, which counts as none: the user did not choose it."""


def patch_graphs() -> None:
    """Patch every graph class that exists now."""
    for cls in subclasses(Pregel):
        for name in METHODS:
            if cls is Pregel or name in cls.__dict__:
                dispatch(cls, name, _on_twin, answering_episode)


def _on_twin(episode: AgentEpisode, original: Method, graph: Pregel, args: Args, kwargs: Kwargs) -> Any:
    return original(episode.twin(graph), *args, **kwargs)


class GraphTwins:
    """The copies of graphs ("twins") that one episode runs in place of the originals.

    Args: `recursion_limit`, None for the graph's own, or `RECURSION_LIMIT` where it has none; `simulate_nodes`, names of nodes
    whose plain code the environment answers.
    """

    def __init__(self, episode: AgentEpisode, *, recursion_limit: int | None, simulate_nodes: Collection[str]) -> None:
        self._episode, self._recursion_limit, self._simulate_nodes = episode, recursion_limit, frozenset(simulate_nodes)
        self._checkpointers: dict[int, InMemorySaver] = {}
        self._stores: dict[int, InMemoryStore] = {}
        self._twins: dict[int, tuple[Pregel, Pregel]] = {}
        """id of original or twin -> both, which keeps them alive: the id of a collected object is used again."""
        self._lock = threading.Lock()

    def twin(self, graph: Pregel) -> Pregel:
        """The twin of a graph; a twin is its own."""
        with self._lock:
            if id(graph) not in self._twins:
                twin = self._create(graph)
                self._twins[id(graph)] = self._twins[id(twin)] = graph, twin
            return self._twins[id(graph)][1]

    def limit(self, graph: Runnable[Any, Any]) -> int:
        """Most supersteps of a run of this graph, or of a Runnable around one."""
        configured = (getattr(graph, "config", None) or {}).get("recursion_limit", _UNLIMITED)
        return self._recursion_limit or (configured if configured < _UNLIMITED else RECURSION_LIMIT)

    def _create(self, graph: Pregel) -> Pregel:
        twin = copy.copy(graph)
        twin.cache = None
        twin.config = {**(graph.config or {}), "recursion_limit": self.limit(graph)}
        if isinstance(graph.checkpointer, BaseCheckpointSaver):
            twin.checkpointer = self._checkpointers.setdefault(
                id(graph.checkpointer), InMemorySaver(serde=graph.checkpointer.serde)
            )
        if graph.store is not None:
            twin.store = self._stores.setdefault(id(graph.store), _copy_store(graph.store))
        if names := self._simulate_nodes & set(graph.nodes):
            nodes = graph.nodes.items()
            twin.nodes = {name: self._simulated(name, node) if name in names else node for name, node in nodes}
        return twin

    def _simulated(self, name: str, node: PregelNode) -> PregelNode:
        """A node that the environment answers. Its input is the action, the answer its state update (JSON)."""

        def action(state: Any) -> str:
            return render_call(f"node:{name}", to_jsonable_python({"state": state}, fallback=str))

        code = getattr(node.bound, "func", None) or getattr(node.bound, "afunc", None)
        read, line = partial(_update, name), first_line(code) or f"node {name!r}"

        def ask(state: Any) -> Any:
            return self._episode.play(action(state), None, read, line=line)[1]

        async def aask(state: Any) -> Any:
            return (await self._episode.aplay(action(state), None, read, line=line))[1]

        twin = copy.copy(node)
        twin.__dict__.pop("node", None)  # cached from the real body
        twin.__dict__.pop("flat_writers", None)
        twin.bound = RunnableLambda(ask, aask)
        return twin


def _copy_store(real: BaseStore) -> InMemoryStore:
    """The episode's copied store, with a copy of the items of an in-memory one. Others, on servers, are not read."""
    index: Any = getattr(real, "index_config", None)
    if index:  # search by words: a dream calls no provider of embeddings
        index = {**index, "embed": lambda texts: phi([(text, "") for text in texts]).tolist(), "dims": DIMENSION}
    copied = InMemoryStore(index=index)
    if isinstance(real, InMemoryStore):
        items = [item for each in list(real._data.values()) for item in list(each.values())]
        copied.batch([PutOp(item.namespace, item.key, item.value) for item in items])
    return copied


def _update(name: str, answer: str, *_: bool) -> dict[str, Any]:
    """The state update that the environment answers for a node. Raises `PredictionFailed` if it is no JSON object."""
    with contextlib.suppress(ValueError):
        update = json.loads(answer)
        if isinstance(update, dict):
            return update
    raise PredictionFailed(f"node {name!r} is simulated; its answer must be a JSON object of state keys, got {answer[:120]!r}")
