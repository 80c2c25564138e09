"""Chat models by name."""

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.errors import ConfigurationError, MissingDependency


def load_chat_model(name: str) -> BaseChatModel:
    """The chat model that a name like `openai:gpt-5-mini` stands for (LangChain's `init_chat_model`), at temperature 0.

    Raises `MissingDependency` without `langchain`, `ConfigurationError` for an unknown name or a missing key.
    """
    try:
        from langchain.chat_models import init_chat_model
    except ImportError as error:
        raise MissingDependency(f"the model {name!r} needs langchain; run: pip install 'dreamgym-lg[openai]'") from error
    try:
        model: BaseChatModel = init_chat_model(name, temperature=0)
    except Exception as error:  # each provider has its own way to say that a key or its package is missing
        raise ConfigurationError(f"the model {name!r} cannot be used: {error}") from error
    return model
