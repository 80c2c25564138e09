"""Which prompt format a model is asked in: the one that is wanted, or the one that suits it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableSequence

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.prompt_formats import SCHEMA, JsonFormat, LineFormat, PromptFormat
from dreamgym_lg.hosted.chat_model import Chat

PromptFormatName = Literal["json_schema", "json", "lines"]

PROMPT_FORMATS: Mapping[PromptFormatName, Callable[[str | None, int], PromptFormat]] = {
    "json_schema": partial(JsonFormat, schema=SCHEMA),
    "json": JsonFormat,
    "lines": LineFormat,
}


def bind_schema(model: BaseChatModel, schema: Mapping[str, Any]) -> Chat:
    """The model with a JSON schema bound to it, by its own structured output.

    Without LangChain's parser behind it: ours are stricter, say what is wrong, and leave the token counts in reach.
    """
    structured = model.with_structured_output(dict(schema), method="json_schema")
    return cast(Chat, structured.first) if isinstance(structured, RunnableSequence) else model


def default_format(model: BaseChatModel | None) -> PromptFormatName:
    """The format for a model of which nothing else is known.

    One that is reached with a key is prompted in JSON; a local one may be trained on the lines.
    """
    if model is None or not (model.profile or model.lc_secrets):
        return "lines"
    return "json_schema" if (model.profile or {}).get("structured_output") else "json"


def create_format(
    wanted: PromptFormat | PromptFormatName | None,
    model: BaseChatModel | None,
    instructions: str | None,
    demonstration_characters: int | None,
) -> PromptFormat:
    """The prompt format that is wanted, or the one that suits the model.

    Raises `ConfigurationError` for an unknown name, and for options of a format beside a `PromptFormat` object.
    """
    if wanted is not None and not isinstance(wanted, str):
        for name, given in (("instructions", instructions), ("demonstration_characters", demonstration_characters)):
            if given is not None:
                raise ConfigurationError(
                    f"{name}={given!r} belongs to the prompt format: give it to {type(wanted).__name__}, or name the format "
                    f"({', '.join(PROMPT_FORMATS)})"
                )
        return wanted
    name = wanted or ("lines" if instructions is not None else default_format(model))
    if name not in PROMPT_FORMATS:
        raise ConfigurationError.unknown("prompt_format", name, PROMPT_FORMATS)
    return PROMPT_FORMATS[name](instructions, 1000 if demonstration_characters is None else demonstration_characters)
