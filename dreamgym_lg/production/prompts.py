"""An agent's texts that can change without its graph: system messages and descriptions of tools."""

import asyncio
import copy
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool
from langgraph.pregel import Pregel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.experience_models import resolve_policy
from dreamgym_lg.files import whole_folder
from dreamgym_lg.production.export import (
    LOADING,
    check_free,
    read_manifest,
    seen_from,
    serve_project,
    write_manifest,
    write_project,
)

Changes = Mapping[str, tuple[str, str]]
"""The (original, new) text by component. `description of TOOL` is a tool's; any other is part of a system message."""

_TOOL = "description of "


def components(prompts: Mapping[str, str], tools: Iterable[BaseTool]) -> dict[str, str]:
    """The texts that a prompt learner changes, by name. Args: `prompts`, system messages by node; of alike ones the last."""
    nodes = {text: node or "the model" for node, text in prompts.items()}
    texts = {f"system message of {node}": text for text, node in nodes.items()}
    return texts | {f"{_TOOL}{tool.name}": tool.description for tool in tools if tool.description}


def with_prompts(model: BaseChatModel, changes: Changes, *, matched: set[str] | None = None) -> BaseChatModel:
    """The same chat model, which reads new texts.

    It replaces a part of a system message that is the original, and a tool's description as a whole.

    Args: `matched`, gets the names of the components that calls held.
    """
    kind: Any = type(model)
    names = set[str]() if matched is None else matched

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, messages: Sequence[BaseMessage], *args: Any, **kwargs: Any) -> Any:
            return method(self, _system(messages, changes, names), *args, **_tools(kwargs, changes, names))

        return read

    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    for name in ("_generate", "_agenerate", "_stream", "_astream"):
        if (method := getattr(kind, name)) is not getattr(BaseChatModel, name):  # one that it has not must not seem to be there
            own[name] = reading(method)
    prompted = copy.copy(model)
    object.__setattr__(prompted, "__class__", type(kind)(kind.__name__, (kind,), own))
    return prompted


def _system(messages: Sequence[BaseMessage], changes: Changes, matched: set[str]) -> list[BaseMessage]:
    """The messages with new texts in one system message. As they were where they hold no original."""
    system = [message for message in messages if message.type == "system"]
    old = "\n\n".join(message.text for message in system)
    held = {name: texts for name, texts in changes.items() if not name.startswith(_TOOL) and texts[0] in old}
    matched.update(held)
    texts = dict(held.values())
    originals = sorted(texts, key=len, reverse=True)  # a whole one before its part
    new = re.sub("|".join(map(re.escape, originals)), lambda match: texts[match[0]], old) if texts else old
    if new == old:
        return list(messages)
    return [system[0].model_copy(update={"content": new}), *(each for each in messages if each.type != "system")]


def _tools(value: Any, changes: Changes, matched: set[str]) -> Any:
    """The arguments of a call, tools in any provider's form among them, with new descriptions."""
    if isinstance(value, list):
        return [_tools(each, changes, matched) for each in value]
    if not isinstance(value, dict):
        return value
    value = {key: _tools(each, changes, matched) for key, each in value.items()}
    if (name := f"{_TOOL}{value.get('name')}") in changes and value.get("description") == changes[name][0]:
        matched.add(name)
        value["description"] = changes[name][1]
    return value


def difference(changes: Changes) -> str:
    """The changes as a unified diff."""
    lines = list[str]()
    for name, (original, new) in changes.items():
        lines += unified_diff(original.splitlines(), new.splitlines(), name, name, lineterm="")
    return "".join(f"{line}\n" for line in lines)


_CARD = """# {name}

New texts for the agent `{agent}` with the model `{model}`, found by {learner} in a dream.
Mean reward on the tasks that chose them: {scores[1]:.3f}, before {scores[0]:.3f}. That proves nothing; `compare()` does.
`changes.diff` shows what changed, `manifest.json` has the originals.

`langgraph dev` in this folder serves the agent with them, if it is written in a file. In code of your own:
`with_policy(graph, with_prompts(model, load_prompts("{name}")))`.
"""


def export_prompts(
    changes: Changes, folder: str | Path, record: Mapping[str, Any], *, agent: Mapping[str, Any] | None = None
) -> None:
    """Write prompts to a new folder: a text file each, `changes.diff`, card and manifest.

    Args: `record`, their origin: `model`, `learner` and `scores`; `agent`, as of `export_policy`.

    Raises `ConfigurationError` for a folder that exists or cannot be written.
    """
    check_free(folder := Path(folder))
    names = {name: f"{n}-{re.sub(r'[^A-Za-z0-9_]+', '-', name)}.txt" for n, name in enumerate(changes, start=1)}
    texts = {names[name]: new for name, (_, new) in changes.items()} | {"changes.diff": difference(changes)}
    project = seen_from(folder, agent)
    texts["README.md"] = _CARD.format(name=folder.name, agent=project["path"] if project else "given", **record)
    with whole_folder(folder) as draft:
        for file, text in texts.items():
            (draft / file).write_bytes(text.encode())
        if project:
            write_project(draft, "dreamgym_lg.production.prompts:agent")
        prompts = {n: {"file": names[n], "original": changes[n][0]} for n in changes}
        write_manifest(draft, {**record, "agent": project, "prompts": prompts})


def load_prompts(folder: str | Path) -> Changes:
    """Read exported prompts, for `with_prompts`. Raises `ConfigurationError` for another folder, or one that was changed."""
    if (prompts := read_manifest(folder := Path(folder)).get("prompts")) is None:
        raise ConfigurationError(f"{folder} holds a policy and no prompts: load_policy(folder) reads it")
    return {name: (each["original"], (folder / each["file"]).read_bytes().decode()) for name, each in prompts.items()}


@cache
def _agent() -> Pregel:
    folder = Path(os.environ.get("DREAMGYM_POLICY", "."))
    changes = load_prompts(folder)
    return serve_project(
        folder, read_manifest(folder)["agent"], lambda graph: with_prompts(resolve_policy(None, graph), changes)
    )


async def agent() -> Any:
    """The agent of exported prompts, for `langgraph dev`; its own model reads them."""
    return await asyncio.get_running_loop().run_in_executor(LOADING, _agent)
