"""Imitation of recorded episodes: the base policy and the filtered one, the baselines of a dream."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.evaluation import FILTERED, BestPolicy
from dreamgym_lg.experiment.supervised import fine_tune, start_of, tokenizer_of
from dreamgym_lg.experiment.workspace import Workspace
from dreamgym_lg.rollout import check_played
from dreamgym_lg.types import Step, Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.experiment.supervised import StartModel

POLICY_OPTIONS: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup", "dataloader_drop_last": True}
"""Of the base policy's training: its end is not known when it begins, and a last batch of few rows would weigh as much."""
CHECKED, PATIENCE = 25, 4
"""A policy is evaluated every so many steps, and its training ends after so many evaluations without a better one."""
FILTER = 0.75
"""Share of the highest recorded reward from which an episode is imitated by the filtered policy."""
_START = "stage/base/start"
"""Where the path of the weights that the base policy began with is recorded."""


def train_base_policy(work: Workspace, model: "StartModel" = None) -> None:
    """Train `models/base` on every recorded success until its validation success stops rising; the best one is kept."""
    shown, start = _successes(work), start_of(work, model)
    work.replay_buffer.record_metrics(work.run_name(_START), 0, {"path": str(start)})
    _imitate(work, "base", shown, start)


def train_filtered_policy(work: Workspace) -> None:
    """Train `models/filtered` on `best_episodes`, from the base policy's start and as long as validation success rises.

    Where the best episodes are the successes, which the base policy imitates already, it says so and trains nothing.
    """
    best = best_episodes(work.offline())
    number = 0 if all(trajectory.success for trajectory in best) else len(best)
    if number:
        start = next((row["path"] for row in work.replay_buffer.metrics(work.run_name(_START))), None)
        _imitate(work, "filtered", best, start_of(work, start))
    else:
        work.say(f"no filtered imitation: no recorded episode but the successes earned {FILTER:.0%} of the highest reward")
    work.replay_buffer.record_metrics(work.run_name(FILTERED), 0, {"episodes": number})


def best_episodes(recorded: Sequence[Trajectory]) -> list[Trajectory]:
    """Episodes without an invalid action that succeeded or have at least `FILTER` of the highest reward.

    Left out are those whose last action ended them as a failure: that action must not be imitated.
    """
    clean = [trajectory for trajectory in recorded if trajectory.steps and not trajectory.invalid_actions]
    least = FILTER * max((trajectory.reward for trajectory in clean), default=0.0)
    return [each for each in clean if each.success or (0 < least <= each.reward and not _lost(each.steps[-1]))]


def _lost(last: Step) -> bool:
    return last.terminated and last.reward <= 0


def _imitate(work: Workspace, name: str, shown: Sequence[Trajectory], start: str | Path) -> None:
    """Train `models/NAME` on these episodes until its validation success stops rising; the best one is kept."""
    s = work.settings
    rows = work.world.policy_rows(shown, tokenizer_of(start), max_new_tokens=s.policy_tokens)
    for left in work.models.glob(f"{name}-*"):  # of an attempt that was killed
        shutil.rmtree(left)
    best, until = BestPolicy(work, f"{name}-{uuid4().hex[:8]}"), None
    if untold := _no_evaluation(work):
        work.say(f"{untold}: the {name} policy is trained for all {s.base_steps} steps")
    else:
        _check_evaluation(work)
        until = partial(_stopped_rising, work, name, best)
    fine_tune(work, f"{name} policy", start, f"{name}-last", rows, steps=s.base_steps, until=until, **POLICY_OPTIONS)
    last = work.models / f"{name}-last"
    shutil.rmtree(work.models / name, ignore_errors=True)
    (best.folder if best.folder.exists() else last).rename(work.models / name)
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


def _stopped_rising(work: Workspace, label: str, best: BestPolicy, model: Any, tokenizer: Any, step: int) -> bool:
    """Whether the policy's validation success has stopped rising; the best one is kept on the way.

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
    work.say(f"{label} policy after {step} steps: {kind} {successes}/{len(episodes)}")
    done = step - best.risen_at >= PATIENCE * CHECKED
    if step == work.settings.base_steps and not done:
        work.say(f"the {label} policy's success was still rising when its {step} steps were over: raise base_steps (Settings)")
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
