"""JSON replies: `response_format` in OpenAI's form, and `with_structured_output` on top of it."""

import json
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.requests import ResponseFormat


def to_response_format(schema: dict[str, Any] | type, method: str) -> dict[str, Any]:
    """OpenAI's `response_format` for a schema.

    Raises `ConfigurationError` for a `method` other than `json_schema` and `json_mode`.
    """
    if method == "json_mode":
        return {"type": "json_object"}
    if method != "json_schema":
        raise ConfigurationError.unknown("method", method, ("function_calling", "json_mode", "json_schema"))
    converted = convert_to_json_schema(schema)
    return {"type": "json_schema", "json_schema": {"name": converted.get("title", "answer"), "schema": converted}}


def json_parser(schema: dict[str, Any] | type) -> Runnable[AIMessage, Any]:
    """Instances of a pydantic class, dicts for other schemas; a broken or cut answer raises."""

    def read(message: AIMessage) -> Any:
        parsed = message.additional_kwargs.get("parsed")
        if parsed is None:
            raise OutputParserException(f"the reply is no JSON object: {message.text[:80]!r}", llm_output=message.text)
        if not (isinstance(schema, type) and is_basemodel_subclass(schema)):
            return parsed
        try:
            return schema(**parsed)
        except ValueError as error:  # pydantic's, of either version
            raise OutputParserException(f"the reply does not fit its schema: {error}", llm_output=message.text) from error

    return RunnableLambda(read)


def with_raw(model: Runnable[Any, Any], parser: Runnable[AIMessage, Any]) -> Runnable[Any, Any]:
    """`{"raw", "parsed", "parsing_error"}`, whatever was answered."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def json_section(response_format: ResponseFormat) -> str | None:
    """The system message's instruction to answer in JSON, with its schema. None if the answer is free text.

    Raises `ConfigurationError` for an unknown type of response format.
    """
    if isinstance(response_format, type):
        response_format = to_response_format(response_format, "json_schema")
    if response_format is None or response_format["type"] == "text":
        return None
    kind = response_format["type"]
    if kind not in ("json_object", "json_schema"):
        raise ConfigurationError.unknown("type of response_format", kind, ("json_object", "json_schema", "text"))
    section = "Answer with one JSON object and nothing else."
    if kind == "json_schema":
        schema = response_format["json_schema"]["schema"]
        section += f" It has to fit this JSON schema:\n{json.dumps(schema, ensure_ascii=False)}"
    return section


def parse_json(text: str) -> Any:
    """The text as JSON; None if it is not."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
