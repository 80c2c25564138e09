"""Experience models by name: a folder of weights, asked as it was trained, or a hosted model."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.chat_models import to_experience_model
from dreamgym_lg.experience.hidden_facts import HiddenFacts
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.experiment.settings import Settings, read_settings
from dreamgym_lg.replay.buffer import ReplayBuffer


def is_local_model(name: str) -> bool:
    """Whether a name is that of a folder or of the Hugging Face hub, and none like `openai:MODEL`."""
    return Path(name).is_dir() or ("/" in name and ":" not in name)


def local_experience_model(
    name: str,
    replay_buffer: ReplayBuffer,
    hidden_facts: HiddenFacts | None = None,
    *,
    notes: bool = False,
    writes: Collection[str] = (),
) -> ExperienceModel:
    """An experience model from a folder of weights, or from the hub.

    One that an experiment trained (`runs/mine/models/experience-0`) is asked as in its training, by the settings beside it;
    any other is prompted. Raises `ConfigurationError` if there is no such model.
    """
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    path = Path(name)
    if path.parent.is_dir() and not path.is_dir():
        known = [str(each) for each in path.parent.iterdir() if (each / "config.json").exists()]
        raise ConfigurationError.unknown("experience model", name, known)
    given = read_settings(path.parent.parent) or {}
    names = ("retrieved", "retrieved_characters", "experience_tokens")
    settings = replace(Settings(), **{key: given[key] for key in names if key in given})
    model = LocalChatModel.from_path(name, temperature=0, max_new_tokens=settings.experience_tokens)
    if given:
        return as_trained(model, settings, replay_buffer, hidden_facts, path.name, notes=notes, writes=writes)
    return to_experience_model(model, replay_buffer, hidden_facts=hidden_facts, notes=notes, writes=writes)


def load_experience_model(name: str, replay_buffer: ReplayBuffer) -> ExperienceModel:
    """An experience model from what a user calls it: a hosted model's name, a folder, or a name on the hub."""
    return local_experience_model(name, replay_buffer) if is_local_model(name) else to_experience_model(name, replay_buffer)


def as_trained(
    model: BaseChatModel | None,
    settings: Settings,
    replay_buffer: ReplayBuffer,
    hidden_facts: HiddenFacts | None,
    version: str,
    *,
    notes: bool,
    writes: Collection[str],
) -> ExperienceModel:
    """The experience model as `train_experience` trains it and every dream asks it."""
    return ExperienceModel(
        model,
        replay_buffer=replay_buffer,
        demonstrations=settings.retrieved,
        demonstration_characters=settings.retrieved_characters,
        instructions="",  # a model that is trained on the format needs none
        hidden_facts=hidden_facts,
        notes=notes,
        writes=writes,
        retries=0,
        version=version,
    )
