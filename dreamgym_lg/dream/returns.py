"""Checks a dreamed answer against the JSON schema of what its tool returns."""

import json
from collections.abc import Mapping
from typing import Any

from dreamgym_lg.actions import parse_call
from dreamgym_lg.dream.parts import Answer
from dreamgym_lg.tasks import schemas
from dreamgym_lg.types import Task

_TYPES: Mapping[str, tuple[type, ...]] = {
    **{"object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float)},
    **{"boolean": (bool,), "null": (type(None),)},
}


def returns_schema(task: Task, action: str) -> Mapping[str, Any] | None:
    """The schema of what the called tool returns; None for another action, or where the tool returns any text."""
    call = parse_call(action)
    return next((f.get("returns") for f in schemas(task) if call is not None and f["name"] == call.name), None)


def fits_returns(task: Task, action: str, answer: Answer) -> bool:
    """Whether a valid answer has the structure that the tool returns; error texts always fit.

    Types, items, required keys, `enum` and `const` are compared, no further keywords.
    """
    schema = returns_schema(task, action)
    if schema is None or not answer.valid:
        return True
    try:
        return _fits(json.loads(answer.observation), schema, schema)
    except (ValueError, RecursionError):
        return False


def _fits(value: Any, schema: Any, root: Mapping[str, Any]) -> bool:
    if not isinstance(schema, Mapping):  # true, or no schema
        return True
    if "$ref" in schema:
        return _fits(value, root.get("$defs", {}).get(schema["$ref"].rpartition("/")[2]), root)
    if "anyOf" in schema or "oneOf" in schema:
        return any(_fits(value, option, root) for option in schema.get("anyOf") or schema["oneOf"])
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if not isinstance(value, _TYPES.get(str(schema.get("type")), (object,))):
        return False
    if isinstance(value, list):
        return all(_fits(item, schema.get("items"), root) for item in value)
    if isinstance(value, dict):
        keys, others = schema.get("properties", {}), schema.get("additionalProperties")
        complete = all(key in value for key in schema.get("required", ()))
        return complete and all(_fits(item, keys.get(key, others), root) for key, item in value.items())
    return True
