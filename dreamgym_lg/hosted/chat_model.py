"""Chat models by name, and the names and servers of chat models."""

import re
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable

from dreamgym_lg.errors import ConfigurationError, MissingDependency

Chat = Runnable[Any, AIMessage]
"""A chat model, or one with arguments bound to it."""

EXAMPLE_MODEL = "openai:gpt-5.4-mini"
"""The small hosted model that help texts name; docs name it too."""


def load_chat_model(name: str) -> BaseChatModel:
    """The chat model that a name like `openai:MODEL` stands for (LangChain's `init_chat_model`), at temperature 0.

    Raises `MissingDependency` saying what to install without `langchain` or the provider's package, `ConfigurationError` for an
    unknown name or a missing key.
    """
    try:
        from langchain.chat_models import init_chat_model

        model: BaseChatModel = init_chat_model(name, temperature=0)
    except ImportError as error:
        raise MissingDependency(f"the model {name!r} needs another package; run: {_install(name, str(error))}") from error
    except Exception as error:  # each provider has its own way to say that a key is missing
        raise ConfigurationError(f"the model {name!r} cannot be used: {error}") from error
    return model


def _install(name: str, told: str) -> str:
    """The command that installs what is missing. Args: `told`, the error, in which LangChain names the provider's package."""
    provider = name.partition(":")[0] if ":" in name else "openai"
    found = re.search(r"langchain-[a-z-]+", told)
    package = found[0] if found else f"langchain-{provider.replace('_', '-')}"
    return "pip install 'dreamgym-lg[openai]'" if package == "langchain-openai" else f"pip install langchain {package}"


def name_of(model: object) -> str:
    """The model's name as its server knows it, else its class."""
    names = (getattr(model, attribute, None) for attribute in ("model_name", "model", "model_id", "deployment_name"))
    return next((name for name in names if isinstance(name, str) and name), type(model).__name__)
