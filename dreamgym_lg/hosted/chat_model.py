"""Chat models: by name, and their names and servers."""

import re
from typing import Any
from urllib.parse import urlsplit

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableConfig

from dreamgym_lg.errors import ConfigurationError, MissingDependency

Chat = Runnable[Any, AIMessage]
"""A chat model, or one with arguments bound to it."""

EXAMPLE_MODEL = "openai:gpt-5.4-mini"
"""The small hosted model that help texts name; docs name it too."""

APART: RunnableConfig = {"callbacks": []}
"""Of a dream's calls: the callbacks and streams of an agent that is under way do not see them."""

MAX_RETRIES, TIMEOUT = 6, 120.0
"""Of a model by name, by its provider's client: tries after a refused, lost or late call; seconds of one try."""


def load_chat_model(name: str) -> BaseChatModel:
    """The chat model of a name like `openai:MODEL` (LangChain's `init_chat_model`), at temperature 0.

    Its client tries a call again `MAX_RETRIES` times, and heeds `Retry-After` if its provider does. Raises
    `MissingDependency` saying what to install without `langchain` or the provider's package, `ConfigurationError` for an
    unknown name or a missing key.
    """
    try:
        from langchain.chat_models import init_chat_model

        model: BaseChatModel = init_chat_model(name, temperature=0, max_retries=MAX_RETRIES, timeout=TIMEOUT)
    except ImportError as error:
        raise MissingDependency(f"the model {name!r} needs another package; run: {_install(name, str(error))}") from error
    except Exception as error:  # each provider has its own way to say that a key is missing
        raise ConfigurationError(f"the model {name!r} cannot be used: {error}") from error
    return model


def _install(name: str, message: str) -> str:
    """The command that installs a provider's package, which LangChain's error message names."""
    provider = name.partition(":")[0] if ":" in name else "openai"
    named = re.search(r"langchain-[a-z-]+", message)
    package = named[0] if named else f"langchain-{provider.replace('_', '-')}"
    return "pip install 'dreamgym-lg[openai]'" if package == "langchain-openai" else f"pip install langchain {package}"


def name_of(model: object) -> str:
    """The model's name as its server knows it, else its class."""
    names = (getattr(model, attribute, None) for attribute in ("model_name", "model", "model_id", "deployment_name"))
    return next((name for name in names if isinstance(name, str) and name), type(model).__name__)


def host_of(model: object) -> str:
    """` at HOST:PORT` of a chat model's own address, else ""."""
    fields = vars(getattr(model, "bound", model))  # the model behind bound arguments
    addresses = (value for name, value in fields.items() if re.search(r"(base|url|endpoint)$", name) and isinstance(value, str))
    hosts = (urlsplit(address).netloc.rpartition("@")[2] for address in addresses)
    return next((f" at {host}" for host in hosts if host), "")
