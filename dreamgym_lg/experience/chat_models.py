"""Experience models and chat models from whatever names one."""

import re
from collections.abc import Collection

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.experience.hidden_facts import HiddenFacts
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.replay.buffer import ReplayBuffer


def load_chat_model(name: str) -> BaseChatModel:
    """The chat model that a name like `openai:gpt-5-mini` stands for (LangChain's `init_chat_model`), at temperature 0.

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


def to_experience_model(
    given: ExperienceModel | BaseChatModel | str,
    replay_buffer: ReplayBuffer,
    *,
    demonstrations: int = 3,
    demonstration_characters: int = 1000,
    hidden_facts: HiddenFacts | None = None,
    notes: bool = False,
    writes: Collection[str] = (),
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
        hidden_facts=hidden_facts,
        notes=notes,
        writes=writes,
    )
