"""The base policy: supervised training on recorded successes."""

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.evaluation import BestPolicy
from dreamgym_lg.experiment.supervised import fine_tune, start_of, tokenizer_of
from dreamgym_lg.experiment.workspace import Workspace
from dreamgym_lg.rollout import check_played
from dreamgym_lg.types import Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.experiment.supervised import StartModel

POLICY_OPTIONS: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup", "dataloader_drop_last": True}
"""Of the base policy's training: its end is not known when it begins, and a last batch of few rows would weigh as much."""
CHECKED, PATIENCE = 25, 4
"""The base policy is evaluated every so many steps, and its training ends after so many evaluations without a better one."""


def train_base_policy(work: Workspace, model: "StartModel" = None) -> None:
    """Train `models/base` on every recorded success until its validation success stops rising; the best one is kept."""
    shown, start, s = _successes(work), start_of(work, model), work.settings
    rows = work.world.policy_rows(shown, tokenizer_of(start), max_new_tokens=s.policy_tokens)
    for left in work.models.glob("base-*"):  # of an attempt that was killed
        shutil.rmtree(left)
    best, until = BestPolicy(work, f"base-{uuid4().hex[:8]}"), None
    if untold := _no_evaluation(work):
        work.say(f"{untold}: the base policy is trained for all {s.base_steps} steps")
    else:
        _check_evaluation(work)
        until = partial(_stopped_rising, work, best)
    fine_tune(work, "base policy", start, "base-last", rows, steps=s.base_steps, until=until, **POLICY_OPTIONS)
    last = work.models / "base-last"
    shutil.rmtree(work.models / "base", ignore_errors=True)
    (best.folder if best.folder.exists() else last).rename(work.models / "base")
    shutil.rmtree(last, ignore_errors=True)


def _no_evaluation(work: Workspace) -> str | None:
    """Why no success says when the base policy is done; None if it does."""
    if not work.validation_tasks():
        return "there is no task of the split 'validation' (dataclasses.replace(task, split='validation') gives it one)"
    if work.settings.real_budget == 0 and work.settings.references_only:
        return "real_budget=0 lets no validation task be played on real tools, and under references_only no dream judges one"
    return None


def _check_evaluation(work: Workspace) -> None:
    """Raise `ConfigurationError` where the base policy cannot be evaluated in the dream, before it is trained."""
    if work.settings.real_budget == 0 and not work.can_dream:
        raise ConfigurationError(
            f"real_budget=0 evaluates the base policy in the dream, and {work.out} holds no experience model: call "
            "train_experience() first, or give real_budget"
        )


def _stopped_rising(work: Workspace, best: BestPolicy, model: Any, tokenizer: Any, step: int) -> bool:
    """Whether the base policy's validation success has stopped rising; the best one is kept on the way.

    It is real success unless `real_budget` is 0, else that in the dream.
    """
    if step % CHECKED and step != work.settings.base_steps:
        return False
    policy = _policy(work, model, tokenizer)
    kind, dream = ("real", None) if work.settings.real_budget != 0 else ("dream", work.dream())
    name = f"validate/{best.name}" if dream is None else f"validate/{best.name}/dream"
    episodes = check_played(work.play(name, policy, work.validation_tasks(), iteration=step, dream=dream))
    successes = sum(trajectory.success for trajectory in episodes)
    best.offer(step, successes, sum(t.reward for t in episodes) / max(len(episodes), 1), policy)
    work.say(f"base policy after {step} steps: {kind} {successes}/{len(episodes)}")
    done = step - best.risen_at >= PATIENCE * CHECKED
    if step == work.settings.base_steps and not done:
        work.say(f"the base policy's success was still rising when its {step} steps were over: raise base_steps (Settings)")
    return done


def _policy(work: Workspace, model: Any, tokenizer: Any) -> Any:
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    return LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=work.settings.policy_tokens)


def _successes(work: Workspace) -> list[Trajectory]:
    """Offline successes without an invalid action. Raises `ConfigurationError` if there is none."""
    offline = work.offline()
    shown = [trajectory for trajectory in offline if trajectory.success and not trajectory.invalid_actions]
    if not shown:
        raise ConfigurationError(
            f"no offline trajectory of {len(offline)} is a success without an invalid action: there is nothing to fine-tune a "
            "base policy on; collect or import some, or give train() a policy that is good enough already"
        )
    return shown
