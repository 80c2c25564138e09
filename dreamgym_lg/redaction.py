"""Keeps keys and passwords out of texts."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import finalize

from pydantic import BaseModel, SecretStr

_hidden: dict[int, tuple[Path, ...]] = {}
"""By id of the open replay buffer or the `Hosted` whose files they are."""
_MIN_SECRET_LENGTH = 8
"""Least length of a secret. Shorter ones ("EMPTY", for a server of one's own) occur in ordinary text."""
_SECRET_NAMES = re.compile(r"(?i)(key|token|secret|password|passwd|passphrase)s?$")


def answers_beside(path: Path) -> Path:
    """The file of hosted models' answers that is kept beside a replay buffer."""
    return path.with_name(f"{path.stem}-answers.db")


def hide_files(owner: object, *paths: Path) -> None:
    """Hide these files from agents in training, until `show_files` or the end of their owner."""
    _hidden[id(owner)] = tuple(path.absolute() for path in paths)
    finalize(owner, _hidden.pop, id(owner), None)


def show_files(owner: object) -> None:
    """The owner is closed: its files may be read."""
    _hidden.pop(id(owner), None)


def hidden_files() -> frozenset[Path]:
    """Files of the open replay buffers and of hosted models' answers."""
    return frozenset(path for paths in [*_hidden.values()] for path in paths)


def secrets(model: object) -> set[str]:
    """The keys that a model holds. In `SecretStr` fields, those of what it is bound to, and authorising headers."""
    return {key for key in _secrets(model, 0) if len(key) >= _MIN_SECRET_LENGTH}


def _secrets(value: Any, depth: int) -> Iterator[str]:
    parts: Iterable[Any] = ()
    if isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif depth > 4:
        return
    elif isinstance(value, BaseModel):
        parts = vars(value).values()
    elif isinstance(value, Mapping):
        parts = value.values()
        for name, text in value.items():
            if isinstance(text, str) and re.search(r"(?i)authorization|api.?key|token$|secret|password", str(name)):
                yield text.split()[-1] if text.split() else ""
    elif isinstance(value, list | tuple):
        parts = value
    for part in parts:
        yield from _secrets(part, depth + 1)


def redact(text: str, keys: Iterable[str]) -> str:
    """The text without the keys, and without credentials in addresses."""
    return re.sub(r"(?<=://)[^/\s@]+(?=@)", "[key]", without_keys(text, keys))


def without_keys(text: str, keys: Iterable[str]) -> str:
    """The text with `[key]` in the place of each."""
    for key in sorted(keys, key=len, reverse=True):
        text = text.replace(key, "[key]")
    return text


def environment_secrets() -> set[str]:
    """The values of environment variables that are named like a secret: `OPENAI_API_KEY`, `PGPASSWORD`, `HF_TOKEN`."""
    return {value for name, value in os.environ.items() if _SECRET_NAMES.search(name) and len(value) >= _MIN_SECRET_LENGTH}


def redact_environment(text: str) -> str:
    """The text without `environment_secrets`."""
    return without_keys(text, environment_secrets())
