"""A policy as a folder for production: written, loaded, and served by `langgraph dev`.

The server is started in the exported folder, or the environment variable DREAMGYM_POLICY names it.
"""

import asyncio
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel import Pregel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.experience_models import load_named_policy
from dreamgym_lg.files import whole_folder
from dreamgym_lg.hosted import TINKER_FILE, is_on_tinker
from dreamgym_lg.production.provenance import model_card
from dreamgym_lg.simulate import with_policy
from dreamgym_lg.user_code import load_agent

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

logger = logging.getLogger(__name__)
LOADING = ThreadPoolExecutor(1)
"""One thread, so that requests which come together load once: `cache` itself lets each load."""

_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model"}
"""File types of a model without code of its own: weights, settings, vocabularies."""


def export_policy(
    policy: "LocalChatModel",
    folder: str | Path,
    *,
    provenance: Mapping[str, Any],
    agent: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a policy to a new folder: weights, tokenizer, sampling, manifest, card, `langgraph.json`.

    It is whole or not there. No file is a program: nothing of it runs when it is loaded, but for the chat template in
    transformers' sandbox. The data that it was trained on are named by counts and hashes.

    Args:
        provenance: JSON of the policy's origin (`production.provenance`).
        agent: For `langgraph dev`: `path`, where the agent is written (`FILE.py:NAME` or `package.module:NAME`), and `route`
            and `pass_through` of `with_policy`. None: the policy alone, as a chat.
        overwrite: Replace an exported policy in that folder, once the new one is whole.

    Raises `ConfigurationError` for a folder that exists (with `overwrite`: that holds no exported policy), for a policy without
    weights in this process, and for a model with code of its own.
    """
    from safetensors import SafetensorError  # what a full disk is to it

    folder = Path(folder)
    if not hasattr(policy, "tokenizer") or (policy.model is None and not is_on_tinker(policy.name_or_path)):
        raise ConfigurationError(
            f"{type(policy).__name__} has no weights in this process: export a LocalChatModel with its model"
        )
    if hasattr(policy.model, "merge_and_unload"):
        raise ConfigurationError("the policy's model is a PeftModel: export a LocalChatModel of model.merge_and_unload()")
    check_free(folder, overwrite)
    with whole_folder(folder, SafetensorError) as draft:
        _write(policy, draft, folder, provenance, agent)


def check_free(folder: Path, overwrite: bool | None = None) -> None:
    """Raise `ConfigurationError` for a folder that is not new. Args: `overwrite`, None where no caller can give it."""
    if overwrite and folder.exists() and not (folder / MANIFEST).is_file():
        raise ConfigurationError(f"{folder} holds no exported policy, so it is not overwritten: name another folder")
    if not overwrite and folder.exists():
        free = next(name for n in count(2) if not (name := folder.with_name(f"{folder.name}-{n}")).exists())
        replaced = "" if overwrite is None else "overwrite=True (--overwrite) replaces it; or "
        raise ConfigurationError(f"{folder} exists already: {replaced}name another, e.g. {free}")


def is_export_of(folder: Path, policy: BaseChatModel, provenance: Mapping[str, Any]) -> bool:
    """True for a whole, unchanged export of these weights with this sampling. Args: as of `export_policy`.

    False for weights without a stamp, such as a model of the hub: others may have the same name.
    """
    if not (Path(str(getattr(policy, "name_or_path", ""))) / "version").is_file():
        return False
    with suppress(ConfigurationError):
        manifest = read_manifest(folder)
        exported = manifest.get("policy_version"), manifest.get("sampling")
        return exported == (provenance["policy_version"], getattr(policy, "sampling", None))
    return False


def load_policy(folder: str | Path, **options: Any) -> "LocalChatModel":
    """Load an exported policy as a chat model, sampling as it was exported. One on Tinker is sampled there.

    Args: `options`, those of `LocalChatModel.from_path`, e.g. `device`, `dtype`, `temperature=0`.

    Raises `ConfigurationError` for a folder that is no export, of a newer format, incomplete, or changed since.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if "prompts" in manifest:
        raise ConfigurationError(f"{folder} holds prompts and no weights: give with_prompts(model, load_prompts(folder))")
    saved = json.loads((folder / "generation_config.json").read_text())
    sampling = {"stop": saved.get("stop_strings") or [], **manifest["sampling"]}
    for name in ("trust_remote_code", "revision"):
        if name in options:
            raise ConfigurationError(f"{name}= is given, and an exported policy has neither code nor revisions: leave it out")
    return load_named_policy(folder, **{**sampling, **options})


def load_exported(folder: Path) -> Pregel:
    """The graph of an exported folder. The server brings its own checkpointer and store.

    Raises `ConfigurationError` as `load_policy` does, and if the agent's source cannot be loaded.
    """
    # its name reaches the server's clients, the way to it need not
    policy = load_policy(folder, name_or_path=folder.resolve().name)
    project = json.loads((folder / MANIFEST).read_text())["agent"]  # checked by now: hashing large weights takes its time
    if project is None:

        async def answer(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await policy.ainvoke(state["messages"])]}

        return StateGraph(MessagesState).add_node("policy", answer).add_edge(START, "policy").compile()
    return serve_project(folder, project, lambda graph: policy)


def serve_project(folder: Path, project: Mapping[str, Any], policy: Callable[[Pregel], BaseChatModel]) -> Pregel:
    """The agent that an exported folder names, with a policy. Args: `policy`, called with the agent's own graph."""
    source, _, name = project["path"].rpartition(":")
    graph = load_agent(f"{(folder / source).resolve()}:{name}" if source.endswith(".py") else project["path"])
    if not isinstance(graph, Pregel):
        raise ConfigurationError(f"{project['path']} is a {type(graph).__name__} and no compiled graph")
    served = with_policy(graph, policy(graph), route=project["route"], pass_through=project["pass_through"])
    served.checkpointer = served.store = None
    return served


@cache
def _agent() -> Pregel:
    return load_exported(Path(os.environ.get("DREAMGYM_POLICY", ".")))


async def agent() -> Any:
    """The exported agent. The server asks for the graph at each run, and allows its loop no loading of models."""
    return await asyncio.get_running_loop().run_in_executor(LOADING, _agent)


# --- writing ------------------------------------------------------------------------------------------------------------------


def _write(
    policy: "LocalChatModel", draft: Path, folder: Path, provenance: Mapping[str, Any], agent: Mapping[str, Any] | None
) -> None:
    from dreamgym_lg.integrations.transformers.adapter_files import write_model

    model: Any = policy.model
    if model is None:
        policy.save(draft)
        weights, template = {"tinker": json.loads((draft / TINKER_FILE).read_text())}, None
    else:
        weights = {"parameters": sum(each.numel() for name, each in model.named_parameters() if ".lora_" not in name)}
        write_model(model, draft)
        policy.tokenizer.save_pretrained(draft)
        _edit(next(draft.rglob("config.json")), {"_name_or_path": None})
        template = _response_template(policy)
    _generation_config(policy).save_pretrained(draft)
    # no path on this machine is exported
    _edit(draft / "tokenizer_config.json", {"response_template": template, "name_or_path": None, "tokenizer_file": None})
    if code := _code(draft):
        raise ConfigurationError(
            f"the model {policy.name_or_path!r} brings code of its own ({code}), and an export holds none: train a model of an "
            "architecture that transformers has"
        )
    record = {
        **provenance,
        **weights,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "sampling": policy.sampling,
        "agent": seen_from(folder, agent),
    }
    (draft / "version").write_text(str(record["policy_version"]))
    write_project(draft, "dreamgym_lg.production.export:agent")
    (draft / "README.md").write_text(model_card(folder.name, record))
    write_manifest(draft, record)
    mode = (draft / MANIFEST).stat().st_mode  # by the umask; safetensors' own are of the owner alone
    for file in draft.rglob("*"):  # adapters stand beside the folder of their base
        if file.is_file():
            file.chmod(mode)


def _generation_config(policy: "LocalChatModel") -> "GenerationConfig":
    """The policy's sampling: from the whole distribution, without the base model's own cuts and penalties."""
    from transformers import GenerationConfig

    tokenizer, ends = policy.tokenizer, sorted(policy.engine.ends)
    settings: dict[str, Any] = {"do_sample": policy.temperature > 0, "max_new_tokens": policy.max_new_tokens}
    if policy.temperature > 0:
        settings |= {"temperature": policy.temperature, "top_k": 0, "top_p": 1.0}
    if policy.stop:
        settings["stop_strings"] = policy.stop
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    return GenerationConfig(**settings, eos_token_id=ends, pad_token_id=pad, bos_token_id=tokenizer.bos_token_id)


def _response_template(policy: "LocalChatModel") -> dict[str, Any] | None:
    """The format by which `transformers serve` reads replies; None, with a warning, if unknown.

    It is the one that transformers knows of this model, else Hermes' where the chat template writes calls in it.
    """
    from transformers.cli.serving.utils import get_response_template

    from dreamgym_lg.integrations.transformers.tool_format import ToolDialect

    tokenizer = policy.tokenizer
    if (known := get_response_template(tokenizer, policy.model)) is not None:
        return dict(known)
    ends = "|".join(re.escape(tokenizer.decode([end])) for end in sorted(policy.engine.ends))
    known_format = ToolDialect(tokenizer, policy.engine.ends).template_format
    before = known_format.before if known_format is not None else ""
    if not re.fullmatch(r'\s*<tool_call>\s*\{"name": "', before):
        logger.warning(
            "the chat template of %s writes tool calls in no format that `transformers serve` knows: load_policy reads them, "
            "an OpenAI-compatible server may return them as text",
            policy.name_or_path,
        )
        return None
    call = {"type": "function", "function": "{content}"}
    calls = {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json", "transform": call}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": _generation_prompt(tokenizer),
        "fields": {"tool_calls": calls, "content": {"close_pattern": rf"\s*(?:{ends})", "content": "text"}},
    }


def _generation_prompt(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The text that the chat template writes before a reply."""
    messages = [{"role": "user", "content": "?"}]
    without = str(tokenizer.apply_chat_template(messages, tokenize=False))
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)).removeprefix(without)


def _edit(file: Path, values: Mapping[str, Any]) -> None:
    """Set values of a JSON file; None takes one out."""
    content = {**json.loads(file.read_text(encoding="utf-8")), **values}
    content = {name: value for name, value in content.items() if name not in values or value is not None}
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _code(draft: Path) -> str:
    """Names of files that run code when loaded, or are no part of a model."""
    files = (path for path in draft.rglob("*") if path.is_file() and path.name != "version")
    foreign = [path.name for path in files if path.suffix not in _SUFFIXES]
    mapped = [path.name for path in draft.rglob("*config.json") if "auto_map" in json.loads(path.read_text())]
    mapped = [name for name in mapped if name in ("config.json", "tokenizer_config.json")]
    return ", ".join([*foreign, *mapped])


def seen_from(folder: Path, agent: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Where an agent is written, seen from the folder: a project moves as a whole."""
    if agent is None:
        return None
    source, _, name = str(agent["path"]).rpartition(":")
    path = f"{os.path.relpath(Path(source).resolve(), folder.resolve())}:{name}"
    return {**agent, "path": path if source.endswith(".py") else agent["path"]}


def write_project(draft: Path, graph: str) -> None:
    """Write what `langgraph dev` reads. Args: `graph`, `module:name` of what gives the graph."""
    project = {"dependencies": ["."], "graphs": {"agent": graph}}
    (draft / "langgraph.json").write_text(json.dumps(project, indent=2) + "\n")


# --- manifest ----------------------------------------------------------------------------------------------------------------


MANIFEST = "manifest.json"
FORMAT = 1
"""Rises when an older dreamgym-lg would misread the folder."""

_AGAIN = "export the policy again, or restore the folder from a copy"


def write_manifest(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the manifest of a folder whose other files are all there. Args: `record`, JSON; what is known of the policy."""
    paths = {name: folder / name for name in sorted(_files(folder))}
    files = {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in paths.items()}
    manifest = {"format": FORMAT, **record, "files": files}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": _digest(manifest)}, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an exported policy whose files are those that were written.

    The hashes show damage and edits. Who can write to the folder can write a new manifest too: they do not say who made it.
    Hidden files are nobody's business: `langgraph dev` keeps its own there.

    Raises `ConfigurationError` for a folder that is no export, of a newer format, incomplete, or changed.
    """
    manifest = _parsed(folder)
    if manifest["format"] > FORMAT:
        raise ConfigurationError(
            f"{folder} has format {manifest['format']}, and this dreamgym-lg reads up to {FORMAT}: pip install -U dreamgym-lg"
        )
    stated, files, present = manifest.pop("sha256", None), manifest["files"], _files(folder)
    if stated != _digest(manifest):
        raise ConfigurationError(f"{folder / MANIFEST} was changed after the export (its own hash differs): {_AGAIN}")
    if missing := sorted(files.keys() - present):
        raise ConfigurationError(f"{folder} is incomplete, {', '.join(missing)} is missing: {_AGAIN}")
    if added := sorted(present - files.keys()):
        raise ConfigurationError(
            f"{folder} holds {', '.join(added)}, which the export did not write and a model could be loaded from: remove it"
        )
    for name, file in files.items():
        if _sha256(folder / name) != file["sha256"]:
            raise ConfigurationError(f"{folder / name} was changed after the export (its hash differs): {_AGAIN}")
    return manifest


def _parsed(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not folder.exists():
        raise ConfigurationError.missing_folder(folder)
    if not file.is_file():
        raise ConfigurationError(
            f"{folder} is no exported policy (it has no {MANIFEST}): give a folder that `dreamgym export` or "
            "DreamGym.export(path) has written"
        )
    try:
        manifest = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{file} is damaged ({error}): {_AGAIN}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int) or "files" not in manifest:
        raise ConfigurationError(f"{file} is no manifest of an exported policy: {_AGAIN}")
    return manifest


def _files(folder: Path) -> set[str]:
    """Relative paths of the files in the folder, without the manifest and hidden ones."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return {path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)} - {MANIFEST}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
