"""Loads policies and experience models by name, and names the versions of their weights."""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream.model import Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings, read_settings
from dreamgym_lg.hosted import TIMEOUT, is_on_tinker, load_chat_model, name_of
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.simulate.object_graph import reachable
from dreamgym_lg.token_recorder import SAMPLING_FILE

if TYPE_CHECKING:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

_PROMPT_SETTINGS = ("retrieved", "retrieved_characters", "experience_tokens")
"""Settings that a local experience model has to be prompted with, as in its training."""


def is_local_model(name: str) -> bool:
    """True for a folder, `smollm2-135m` or a name of the Hugging Face hub, unlike `openai:gpt-5.4-mini`."""
    return Path(name).is_dir() or name == Settings.model or ("/" in name and ":" not in name)


def saved_sampling(folder: str | Path) -> dict[str, Any]:
    """Sampling options of a saved policy, such as `temperature` and `stop`. Empty where none are saved."""
    file = Path(folder) / SAMPLING_FILE
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def load_named_policy(name: str | Path, **options: Any) -> "LocalChatModel":
    """Load the policy of a folder, a hub name or `tinker:MODEL`. A folder's sampling options apply.

    Args: `options`, of the class's `from_path`; they win over saved ones.
    """
    options = {**saved_sampling(name), **options}
    if is_on_tinker(name):
        from dreamgym_lg.integrations.tinker.policy import TinkerChatModel

        return TinkerChatModel.from_path(name, **options)
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    return LocalChatModel.from_path(name, **options)


def place_of_training(policy: object, learner: str | None = None) -> str:
    """`here` or `on Tinker`: the place of a policy's weights. Args: `learner`, a chosen learner's name, if any.

    Raises `ConfigurationError` for a hosted model, and for a learner that trains elsewhere.
    """
    name = model_name(policy)
    remote, is_name = is_on_tinker(name), isinstance(policy, str | Path)
    if not remote and not (is_local_model(name) or ":" not in name if is_name else hasattr(policy, "tokenizer")):
        raise ConfigurationError(
            f"the policy {name} cannot be trained, its weights are elsewhere: give reflection=, a model that improves its "
            "prompts, or in its place a LocalChatModel, a folder, a hub name or tinker:MODEL"
        )
    if learner is not None and remote != (learner == "tinker"):
        raise ConfigurationError(f"learner={learner!r} of a policy {name!r}: tinker:MODEL needs learner='tinker'")
    return "on Tinker" if remote else "here"


def resolve_policy(policy: BaseChatModel | str | None, graph: object) -> BaseChatModel:
    """The chat model that acts: `policy`, by name perhaps, else the agent's only model.

    Raises `ConfigurationError` for an agent without a model or with several, and what `load_chat_model` raises.
    """
    if policy is None:
        models = [each for each in reachable(graph) if isinstance(each, BaseChatModel)]
        if len(models) == 1:
            return models[0]
        names = ", ".join(sorted(type(each).__name__ for each in models)) or "made while it runs"
        raise ConfigurationError(f"the agent has not one model ({names}): name one --policy for all")
    if isinstance(policy, BaseChatModel):
        return policy
    if is_local_model(policy) or is_on_tinker(policy):
        return load_named_policy(policy, temperature=0)
    return load_chat_model(policy, timeout=TIMEOUT + 1)  # another timeout: LangChain must not share the dream's connections


def load_experience_model(
    model: Model | BaseChatModel | str, replay_buffer: ReplayBuffer, settings: Settings | None = None
) -> Model:
    """Load an experience model with retrieval, by name or from a chat model.

    A model that an experiment trained (`runs/mine/models/experience-0`) gets the prompts of its training, with the settings
    stored beside it. A `Model` is returned as it is; without a replay buffer, as a copy with this one that retrieves nothing.

    Args: `settings`, of retrieval, for all other models.

    Raises `ConfigurationError` if there is no such model, and what `load_chat_model` raises.
    """
    if isinstance(model, Model):
        if model.replay_buffer is None:
            model = copy(model)  # another experiment may use the same object
            model.replay_buffer = replay_buffer
        return model
    settings = settings or Settings()
    if isinstance(model, str) and is_local_model(model):
        from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

        path = Path(model)
        if path.parent.is_dir() and not path.is_dir():
            present = [str(each) for each in path.parent.iterdir() if (each / "version").exists()]
            raise ConfigurationError.unknown("experience model", model, present)
        stored = read_settings(path.parent.parent)
        settings = replace(settings, **{name: stored[name] for name in _PROMPT_SETTINGS} if stored is not None else {})
        local = LocalChatModel.from_path(model, temperature=0, max_new_tokens=settings.experience_tokens)
        if stored is not None:
            return as_trained(local, settings, replay_buffer, path.name)
        model = local
    return _retrieving(model, settings, replay_buffer)


def as_trained(model: BaseChatModel | None, settings: Settings, replay_buffer: ReplayBuffer, version: str) -> Model:
    """An experience model with the prompts that `train_experience` trains it on."""
    # a model that is trained on the format needs no instructions
    return _retrieving(model, settings, replay_buffer, instructions="", retries=0, version=version)


def _retrieving(model: BaseChatModel | str | None, settings: Settings, replay_buffer: ReplayBuffer, **options: Any) -> Model:
    demonstrations, characters = settings.retrieved, settings.retrieved_characters
    options |= {"demonstrations": demonstrations, "demonstration_characters": characters}
    return Model(model, replay_buffer=replay_buffer, **options)


def policy_version(policy: BaseChatModel | str | Path) -> str:
    """Version of weights: the stamp in their folder, else path, name or class."""
    name = str(Path(policy) if isinstance(policy, str | Path) else getattr(policy, "name_or_path", ""))
    stamp = Path(name) / "version"
    return stamp.read_text() if name and stamp.is_file() else name or name_of(policy)


def model_name(model: object) -> str:
    """Name or path of a model, or of the `model` argument of a partial function."""
    model = getattr(model, "keywords", {}).get("model", model)
    if model is None or isinstance(model, str | Path):
        return str(model)
    return str(getattr(model, "name_or_path", "")) or name_of(model)
