"""Initial weights of a folder's policies, and those that its training begins with."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.choice import START_BASELINE, start_baseline
from dreamgym_lg.experiment.evaluation import START, START_POLICY
from dreamgym_lg.experiment.experience_models import model_name, policy_version, saved_sampling
from dreamgym_lg.experiment.supervised import start_of, tokenizer_of
from dreamgym_lg.experiment.workspace import Workspace
from dreamgym_lg.hosted import is_on_tinker
from dreamgym_lg.report.proof import BASELINES

if TYPE_CHECKING:
    from dreamgym_lg.experiment.supervised import StartModel
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

PROMPTING = ("stop", "chat_template_kwargs")
"""Sampling options (`saved_sampling`) that belong to a model, whatever trains it."""


def start_weights(work: Workspace) -> str | Path:
    """The initial weights of the folder's policies, whether or not one is trained yet."""
    return start_of(work, work.record(START).get("path"))


def start_sampling(work: Workspace) -> dict[str, Any]:
    """The sampling options that every policy of the folder has from its start (`PROMPTING`). Without empty ones."""
    saved = saved_sampling(start_weights(work))
    return {name: saved[name] for name in PROMPTING if saved.get(name)}


def begin_with(work: Workspace, model: "StartModel" = None) -> str | Path:
    """The initial weights of the folder's policies. The first call records them.

    Raises `ConfigurationError` for another model than the recorded one, and for one without a tokenizer.
    """
    if not (recorded := work.record(START)):
        path = start_of(work, model)
        if not is_on_tinker(path):
            tokenizer_of(path)  # raises for a misspelt name, before it is recorded
        work.keep_record(START, {"path": str(path), "name": model_name(model or path)})
        return path
    if model is not None and not is_start(work, model):
        raise ConfigurationError(
            f"the policies in {work.out} begin with {recorded.get('name', recorded['path'])!r}, and {model_name(model)!r} is "
            "given, with other weights or prompts: take another folder"
        )
    return start_weights(work)


def is_start(work: Workspace, model: "LocalChatModel | str | Path") -> bool:
    """True if the recorded initial weights are this model's. An object is compared with the weights that one left."""
    recorded = work.record(START)
    path = Path(recorded["path"])
    if isinstance(model, str | Path) or model.model is None or path.resolve() != (work.models / "start").resolve():
        return policy_version(model) in {policy_version(path), policy_version(recorded.get("name", path))}
    from dreamgym_lg.integrations.transformers.loading import load_model

    sampling, template = saved_sampling(path), tokenizer_of(path).chat_template
    if template != model.tokenizer.chat_template or any(sampling.get(name) != model.sampling[name] for name in PROMPTING):
        return False
    saved, own = load_model(path, device="cpu").state_dict(), model.model.state_dict()
    return saved.keys() == own.keys() and all(saved[name].float().equal(own[name].cpu().float()) for name in saved)


def is_stored(work: Workspace, policy: "LocalChatModel | str | Path", name: str) -> bool:
    """True if the policy is `models/NAME`."""
    return policy_version(policy) == policy_version(work.models / name)


def check_policy(work: Workspace, policy: "LocalChatModel | str | Path") -> None:
    """Raise `ConfigurationError` for a policy that training in this folder may not begin with.

    It begins with the initial weights of the folder's other policies, or with one of these; once begun, it keeps to its own.
    """
    given = work.record(START_POLICY)
    if not given and not work.training_began:
        if work.record(START) and not any(is_stored(work, policy, name) for name in BASELINES):
            begin_with(work, policy)
        return
    base = policy_version(given.get("path", work.models / start_baseline(work)))
    start, version = given.get("policy", base), policy_version(policy)
    if version not in (start, base) and not is_stored(work, policy, "trained"):
        raise ConfigurationError(
            f"{work.out} trains the policy {start!r}, and {version!r} is given: give the first one, or take another folder "
            "(out=, --out)"
        )


def record_start(work: Workspace, policy: "LocalChatModel", given: "LocalChatModel | str | Path | None") -> None:
    """Record what training begins with. Args: `given`, the `policy=` of the call, if any."""
    name = start_baseline(work)
    if given is not None:
        name = next((each for each in BASELINES if is_stored(work, given, each)), "")
    if name:
        work.keep_record(START_BASELINE, {"name": name})
        work.say(f"training begins with the {name} policy")
        return
    assert given is not None  # else it is a baseline
    if not work.record(START):
        policy.save(path := work.models / "start")
        work.keep_record(START, {"path": str(path), "name": model_name(given)})
    figures = {"policy": policy_version(given), "name": model_name(given), "path": work.record(START)["path"]}
    work.keep_record(START_POLICY, figures)
