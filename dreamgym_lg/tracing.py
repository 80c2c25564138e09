"""Marks episodes for tracers, and shows them dreamed ones only on demand.

LangSmith's tracing context carries the mark: LangChain puts its tags on every run that is made in it, whoever traces them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from langsmith.env import get_langchain_env_var_metadata
from langsmith.run_helpers import get_tracing_context, tracing_context
from langsmith.run_trees import get_cached_client

MARK = "dreamgym"
"""Key of the metadata whose value is `dream` or `real`; the tag is `dreamgym: dream` or `dreamgym: real`."""

_CARRIED = ("project_name", "client", "replicas", "tags", "metadata", "enabled")


def caller_tracing() -> dict[str, Any]:
    """The caller's `langsmith.tracing_context`, for episodes that begin in a context of their own."""
    return {name: value for name, value in get_tracing_context().items() if name in _CARRIED and value is not None}


@contextmanager
def episode_tracing(
    kind: Literal["dream", "real"], about: Mapping[str, str] | None = None, *, caller: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Every run in the block is marked as of an episode of this kind.

    LangSmith is sent a dreamed one only inside of `tracing_context(enabled=True)`: the environment variable that turns
    production's tracing on is no wish to have thousands of dreams there.

    Args:
        about: Further metadata, such as the episode's task.
        caller: The caller's tracing context. Default: that of the running code.
    """
    context = dict(caller_tracing() if caller is None else caller)
    if kind == "dream":
        context.setdefault("enabled", False)
    if context.get("enabled"):
        # the guard would stop what the first trace of a process does: it asks git, and begins the thread that sends
        get_langchain_env_var_metadata()
        context.setdefault("client", get_cached_client())
    tags, metadata = context.get("tags", []), context.get("metadata", {})
    if MARK not in metadata:  # else an outer block has marked it
        context |= {"tags": [*tags, f"{MARK}: {kind}"], "metadata": {**metadata, MARK: kind, **(about or {})}}
    with tracing_context(**context):
        yield
