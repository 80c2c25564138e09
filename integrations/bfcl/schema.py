"""Argument schemas of BFCL's tools, made from its own function documents, so that LangChain enforces them."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator, create_model
from typing_extensions import TypedDict

from dreamgym_lg.integrations.bfcl.data import documents

_STRICT = ConfigDict(extra="forbid", strict=True)
_LARGEST = {("MathAPI", "exponent"): 1000, ("MathAPI", "precision"): 1000}
"""Python computes with any number of digits: without a limit, one absurd argument would stop a run for hours."""


def _unchanged(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    check(value)
    return value


_Number = Annotated[float, WrapValidator(_unchanged)]
"""A float that leaves an integer an integer: BFCL compares answers as text, and 2 + 2 must not become 4.0."""

_dictionary: Any = TypedDict  # made from data, which no type checker follows; a nested model would not reach the API as a dict


def allowed_values(parameter: Mapping[str, Any]) -> tuple[str, ...]:
    """What a parameter may be; () for anything of its type. BFCL says it in the description: `[Enum]: ["on", "off"]`."""
    listed = re.search(r"\[Enum\]:\s*(\[[^]]*\]|[^.\[\]]+)", parameter.get("description", ""))
    return tuple(value for part in listed[1].strip("[] ").split(",") if (value := part.strip(" \"'"))) if listed else ()


def is_optional(parameter: Mapping[str, Any]) -> bool:
    """Whether None is allowed: BFCL writes it as the default `"None"`."""
    return parameter.get("default") == "None"


@cache
def arguments_schema(class_name: str, name: str) -> type[BaseModel]:
    """The pydantic model of the arguments of a method; strict, that is: nothing is converted, nothing may be added."""
    parameters = documents(class_name)[name]["parameters"]
    fields: dict[str, Any] = {}
    for key, parameter in parameters["properties"].items():
        kind = _type(key, parameter) | None if is_optional(parameter) else _type(key, parameter)
        default = ... if key in parameters["required"] else None if is_optional(parameter) else parameter["default"]
        limit = _LARGEST.get((class_name, key))
        fields[key] = (kind, Field(default, description=parameter["description"].strip(), le=limit))
    return create_model(name, __config__=_STRICT, **fields)


def _type(name: str, parameter: Mapping[str, Any]) -> Any:
    allowed = allowed_values(parameter)
    match parameter["type"]:
        case "string":
            return Literal[allowed] if allowed else str
        case "integer":
            return int
        case "float":
            return _Number
        case "boolean":
            return bool
        case "array":
            return list[_type(name, {"description": parameter["description"], **parameter["items"]})]  # type: ignore[misc]
        case "dict":
            fields = {key: _type(key, field) for key, field in parameter["properties"].items()}
            nested = _dictionary(name, fields, total=False)
            nested.__pydantic_config__ = _STRICT
            return nested
    raise NotImplementedError(f"BFCL gives {name} the unknown type {parameter['type']!r}")
