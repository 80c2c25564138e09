"""Patching the classes that an episode answers for, and, for a dream, those that touch the real world."""

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.load.serializable import Serializable
from langchain_core.tools import BaseTool

from dreamgym_lg.simulate.context import ActiveEpisode
from dreamgym_lg.simulate.dispatch import Args, Kwargs, Method, dispatch
from dreamgym_lg.simulate.graphs import patch_graphs
from dreamgym_lg.simulate.guard.guard import install_guard
from dreamgym_lg.simulate.guard.threads import patch_threads
from dreamgym_lg.simulate.models import patch_model_class, patch_models
from dreamgym_lg.simulate.tools import patch_tool_class, patch_tools


def install_answering() -> None:
    """Patch all chat-model and tool classes known by now, and nothing else: what the policy needs in production.

    Users import more classes at any time, so each run calls it anew.
    """
    patch_models()
    patch_tools()
    dispatch(Serializable, "__init__", _patch_new_class)


def install_episode(*, guarded: bool) -> None:
    """Patch what an episode needs: graphs run as its twins, threads belong to it; `guarded` also installs the guard.

    The guard's audit hook stays for the life of the process; outside episodes it does nothing.
    """
    install_answering()
    patch_graphs()
    patch_threads()
    if guarded:
        install_guard()


def _patch_new_class(episode: ActiveEpisode, original: Method, made: Any, args: Args, kwargs: Kwargs) -> None:
    """An object is made during an episode: its class may be younger than the episode's start."""
    original(made, *args, **kwargs)
    if isinstance(made, BaseChatModel | BaseTool):
        for cls in type(made).__mro__:
            if issubclass(cls, BaseChatModel):
                patch_model_class(cls)
            elif issubclass(cls, BaseTool):
                patch_tool_class(cls)
