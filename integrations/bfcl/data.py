"""BFCL's multi-turn entries as tasks, and their ground truth as tool calls."""

import ast
import inspect
import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.resources import files
from typing import Any, get_args

from dreamgym_lg.actions import ToolCall
from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.types import Split, Task

try:
    import mpmath  # noqa: F401 (the maths API needs it, and would only say so in the middle of an episode)
    from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC as MORE_TOOLS
    from bfcl_eval.constants.executable_backend_config import (
        CLASS_FILE_PATH_MAPPING,
        MULTI_TURN_FUNC_DOC_FILE_MAPPING,
        STATELESS_CLASSES,  # noqa: F401 (for `apis`: all of bfcl_eval is imported behind this one guard)
    )
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker  # noqa: F401
except ImportError as error:
    # no extra can say "without its dependencies", and those pin numpy 1.26 and every provider's client
    raise MissingDependency(
        f"bfcl-eval or mpmath is not installed ({error}); run: "
        "pip install 'dreamgym-lg[bfcl]' && pip install --no-deps bfcl-eval"
    ) from error

CATEGORIES = ("multi_turn_base", "multi_turn_long_context", "multi_turn_miss_func", "multi_turn_miss_param")
"""200 entries each, entry n of each about the same scenario. `long_context`: answers of up to 32,000 characters.
`miss_func`: some tools work only from a later user turn on. `miss_param`: a user turn lacks what a later one tells."""

UNSOLVABLE = frozenset({*(f"{category}_173" for category in CATEGORIES), "multi_turn_miss_func_49"})
"""Entries left out: their own tools refuse the ground truth (a ticket named by a text, a tool called too early)."""

SYSTEM_PROMPT = (
    "You carry out a user's requests with the tools you have. Call tools until a request is done, then answer in a few "
    "words. If no tool can do it, or the user left out what a tool needs, say so."
)


def load_tasks(category: str = "multi_turn_base", *, split: Split | None = None) -> list[Task]:
    """One task per entry of `category` (`UNSOLVABLE` ones excepted), in BFCL's order; of one split or of all three.

    60 % of the entries are training tasks, 20 % validation and 20 % test tasks, by a hash of the entry's number: the four
    variants of a scenario fall into one split. Raises `ConfigurationError` for an unknown category or split.
    """
    if split is not None and split not in get_args(Split):
        raise ConfigurationError.unknown("split", split, get_args(Split))
    tasks = [_task(entry) for id, entry in _entries(category).items() if id not in UNSOLVABLE]
    return [task for task in tasks if split in (None, task.split)]


def ground_truth(task: Task) -> list[list[ToolCall]]:
    """The right calls of each user turn; no call where the request cannot be met yet.

    It is looked up by the entry's id and no part of the task, so that no prompt made from a task can show it.
    """
    entry = str(task.metadata["entry_id"])
    category = entry.rpartition("_")[0]
    known = _entries(category)
    if entry not in known:
        raise ConfigurationError.unknown("BFCL entry", entry, known)
    classes = task.metadata["involved_classes"]
    return [[parse_call(call, classes) for call in turn] for turn in known[entry]["ground_truth"]]


def parse_call(expression: str, classes: list[str]) -> ToolCall:
    """Parse a call in Python, such as `sort('report.txt')`, of a method of `classes`; `ConfigurationError` for other texts."""
    try:
        call = ast.parse(expression.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("it is no call of a function")
        method = next(getattr(api(name), call.func.id) for name in classes if call.func.id in documents(name))
        positional = [ast.literal_eval(argument) for argument in call.args]
        named = {str(argument.arg): ast.literal_eval(argument.value) for argument in call.keywords}
        bound = inspect.signature(method).bind(None, *positional, **named)  # None stands for self
    except (StopIteration, SyntaxError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{expression!r} is no call of a method of {', '.join(classes)}: {error}") from error
    return ToolCall(call.func.id, {name: value for name, value in bound.arguments.items() if name != "self"})


def api(class_name: str) -> type:
    """The Python class of one of BFCL's APIs."""
    return getattr(import_module(CLASS_FILE_PATH_MAPPING[class_name]), class_name)


@cache
def documents(class_name: str) -> Mapping[str, Mapping[str, Any]]:
    """BFCL's documentation of each method of an API: name, description and parameters."""
    if class_name not in MULTI_TURN_FUNC_DOC_FILE_MAPPING:
        raise ConfigurationError.unknown("BFCL class", class_name, MULTI_TURN_FUNC_DOC_FILE_MAPPING)
    rows = _read(f"multi_turn_func_doc/{MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]}")
    return {document["name"]: document for document in rows}


@cache
def _entries(category: str) -> Mapping[str, Mapping[str, Any]]:
    if category not in CATEGORIES:
        raise ConfigurationError.unknown("BFCL category", category, CATEGORIES)
    truth = {row["id"]: row["ground_truth"] for row in _read(f"possible_answer/BFCL_v4_{category}.json")}
    return {entry["id"]: {**entry, "ground_truth": truth[entry["id"]]} for entry in _read(f"BFCL_v4_{category}.json")}


def _read(name: str) -> list[dict[str, Any]]:
    lines = files("bfcl_eval").joinpath("data", name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _task(entry: Mapping[str, Any]) -> Task:
    # a turn without a message is the one at which tools become available: BFCL says then what MORE_TOOLS says
    turns = ["\n".join(message["content"] for message in turn) or MORE_TOOLS for turn in entry["question"]]
    withheld = {name: int(turn) for turn, names in entry.get("missed_function", {}).items() for name in names}
    metadata = {
        "entry_id": entry["id"],
        "involved_classes": entry["involved_classes"],
        "initial_config": entry["initial_config"],
        "user_turns": turns,
        "withheld": withheld,  # tool -> the user turn, from 0, from which on it works
    }
    number = entry["id"].rpartition("_")[2]
    place = int(sha256(f"bfcl/{number}".encode()).hexdigest(), 16) % 100
    return Task(
        id=entry["id"],
        instruction=f"{SYSTEM_PROMPT}\n\nThe user's first request: {turns[0]}",
        environment="bfcl",
        observation=turns[0],
        tools=sorted(name for each in entry["involved_classes"] for name in documents(each)),
        metadata=metadata,
        split="train" if place < 60 else "validation" if place < 80 else "test",
    )
