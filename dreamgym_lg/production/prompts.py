"""The texts of an agent that can change without its graph: system messages and descriptions of tools.

They are put in at each model call, written to a folder, and read back."""

import copy
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from difflib import unified_diff
from pathlib import Path
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.production.export import new_folder, read_manifest, write_manifest

ChatModel = TypeVar("ChatModel", bound=BaseChatModel)

Changes = Mapping[str, tuple[str, str]]
"""The (original, new) text of each component, by its name. A tool's is `description of TOOL`, any other a system message's."""

_TOOL = "description of "


def components(prompts: Mapping[str, str], tools: Iterable[BaseTool]) -> dict[str, str]:
    """The texts that a prompt learner changes, by name. Args: `prompts`, system messages by node."""
    texts = {f"system message of {node or 'the model'}": text for node, text in prompts.items()}
    return texts | {f"{_TOOL}{tool.name}": tool.description for tool in tools}


def with_prompts(model: ChatModel, changes: Changes, *, on_match: Callable[[str], object] = lambda name: None) -> ChatModel:
    """The same chat model, which reads the new texts wherever an original one stands.

    `with_policy(graph, with_prompts(model, load_prompts(folder)))` is an agent with them. A system message that holds the
    original has that part replaced; a tool's description has to be the original.

    Args: `on_match`, called with the name of each component that a call held.
    """
    kind: Any = type(model)

    def reads(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(self: Any, messages: Sequence[BaseMessage], *args: Any, **kwargs: Any) -> Any:
            return method(self, _system(messages, changes, on_match), *args, **_tools(kwargs, changes, on_match))

        return read

    names = ("_generate", "_agenerate", "_stream", "_astream")  # one that it has not must not seem to be there
    own = {name: getattr(kind, name) for name in names if getattr(kind, name) is not getattr(BaseChatModel, name)}
    place = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    prompted = copy.copy(model)
    reading = type(kind)(kind.__name__, (kind,), {**place, **{name: reads(method) for name, method in own.items()}})
    object.__setattr__(prompted, "__class__", reading)
    return prompted


def _system(messages: Sequence[BaseMessage], changes: Changes, on_match: Callable[[str], object]) -> list[BaseMessage]:
    """The messages with one system message of new texts; as they were where they hold no original."""
    system = [message for message in messages if message.type == "system"]
    old = new = "\n\n".join(message.text for message in system)
    for name, (original, text) in changes.items():
        if not name.startswith(_TOOL) and original in old:
            on_match(name)
            new = new.replace(original, text)
    if new == old:
        return list(messages)
    return [system[0].model_copy(update={"content": new}), *(each for each in messages if each.type != "system")]


def _tools(value: Any, changes: Changes, on_match: Callable[[str], object]) -> Any:
    """The arguments of a call, tools in any provider's form among them, with new descriptions."""
    if isinstance(value, list):
        return [_tools(each, changes, on_match) for each in value]
    if not isinstance(value, dict):
        return value
    value = {key: _tools(each, changes, on_match) for key, each in value.items()}
    name = f"{_TOOL}{value.get('name')}"
    if name in changes and value.get("description") == changes[name][0]:
        on_match(name)
        value["description"] = changes[name][1]
    return value


def difference(changes: Changes) -> str:
    """The changes as a unified diff."""
    lines = list[str]()
    for name, (original, new) in changes.items():
        lines += unified_diff(original.splitlines(), new.splitlines(), name, name, lineterm="")
    return "".join(f"{line}\n" for line in lines)


def export_prompts(changes: Changes, folder: str | Path, record: Mapping[str, Any]) -> None:
    """Write prompts to a new folder: a text file for each component, `changes.diff` and a manifest.

    Args: `record`, JSON; their origin. Raises `ConfigurationError` for a folder that exists or cannot be written.
    """
    with new_folder(Path(folder)) as draft:
        files = {name: f"{n}-{re.sub(r'[^A-Za-z0-9_]+', '-', name)}.txt" for n, name in enumerate(changes, start=1)}
        for name, file in files.items():
            (draft / file).write_bytes(changes[name][1].encode())
        (draft / "changes.diff").write_bytes(difference(changes).encode())
        prompts = {name: {"file": file, "original": changes[name][0]} for name, file in files.items()}
        write_manifest(draft, {**record, "created": datetime.now(UTC).isoformat(timespec="seconds"), "prompts": prompts})


def load_prompts(folder: str | Path) -> Changes:
    """Read exported prompts, for `with_prompts`. Raises `ConfigurationError` for another folder, or one that was changed."""
    if (prompts := read_manifest(Path(folder)).get("prompts")) is None:
        raise ConfigurationError(f"{folder} holds a policy and no prompts: load_policy(folder) reads it")
    return {name: (each["original"], (Path(folder) / each["file"]).read_bytes().decode()) for name, each in prompts.items()}
