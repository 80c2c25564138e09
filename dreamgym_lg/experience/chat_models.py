"""Experience models from whatever names one."""

from collections.abc import Collection

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.hidden_facts import HiddenFacts
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.hosted.chat_model import load_chat_model
from dreamgym_lg.replay.buffer import ReplayBuffer


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
    """An experience model grounded in `replay_buffer`, from a chat model or a name like `openai:MODEL`.

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
