"""Experience models and chat models from whatever names one."""

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.replay.buffer import ReplayBuffer


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


def to_experience_model(
    given: ExperienceModel | BaseChatModel | str,
    replay_buffer: ReplayBuffer,
    *,
    demonstrations: int = 3,
    demonstration_characters: int = 1000,
) -> ExperienceModel:
    """An experience model grounded in `replay_buffer`, from a chat model or a name like `openai:gpt-5-mini`.

    One that is an `ExperienceModel` already is given back as it is. Raises `ConfigurationError` for anything else, and what
    `load_chat_model` raises.
    """
    if isinstance(given, ExperienceModel):
        return given
    model = load_chat_model(given) if isinstance(given, str) else given
    if not isinstance(model, BaseChatModel):
        raise ConfigurationError(f"experience_model={given!r} is no chat model; give one, its name, or an ExperienceModel")
    return ExperienceModel(
        model,
        replay_buffer=replay_buffer,
        demonstrations=demonstrations,
        demonstration_characters=demonstration_characters,
    )
