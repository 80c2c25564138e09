"""`manifest.json` of an exported policy: its origin, and the hash of every file."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamgym_lg.errors import ConfigurationError

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
