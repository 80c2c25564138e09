"""Imitation of recorded episodes. The base policy and the filtered one, the baselines of a dream."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.evaluation import FILTERED, START, BestPolicy
from dreamgym_lg.experiment.supervised import fine_tune, start_of, tokenizer_of
from dreamgym_lg.experiment.workspace import Workspace
from dreamgym_lg.rollout import check_played
from dreamgym_lg.types import Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.experiment.supervised import StartModel

PASSES, FEWEST, MOST = 3, 25, 600
"""Default number of passes over the imitated episodes, and the least and most optimiser steps for it."""
EVALUATIONS = 3
"""Evaluations of a policy while it is trained, at equal distances. The best is kept."""
FILTER = 0.75
"""Share of the highest recorded reward that an episode of the filtered policy must reach."""


def train_base_policy(work: Workspace, model: "StartModel" = None) -> None:
    """Train `models/base` on every recorded success."""
    episodes, start = _successes(work), start_of(work, model)
    work.replay_buffer.record_metrics(work.run_name(START), 0, {"path": str(start)})
    _imitate(work, "base", episodes, start)


def train_filtered_policy(work: Workspace) -> None:
    """Train `models/filtered` on `best_episodes`, as the base policy is trained and from its start.

    Where the best episodes are the successes, which the base policy imitates already, it says so and trains nothing.
    """
    best = best_episodes(work.offline())
    number = 0 if all(trajectory.success for trajectory in best) else len(best)
    if number:
        start = next((row["path"] for row in work.replay_buffer.metrics(work.run_name(START))), None)
        _imitate(work, "filtered", best, start_of(work, start))
    else:
        work.say(f"no filtered imitation: no recorded episode but the successes earned {FILTER:.0%} of the highest reward")
    work.replay_buffer.record_metrics(work.run_name(FILTERED), 0, {"episodes": number})


def best_episodes(recorded: Sequence[Trajectory]) -> list[Trajectory]:
    """Successes and episodes with `FILTER` of the highest reward, without an invalid action.

    Left out are those whose last action ended them as a failure: that action must not be imitated.
    """
    clean = [trajectory for trajectory in recorded if trajectory.steps and not trajectory.invalid_actions]
    least = FILTER * max((trajectory.reward for trajectory in clean), default=0.0)
    lost = [each.steps[-1].terminated and each.steps[-1].reward <= 0 for each in clean]
    return [each for each, failed in zip(clean, lost, strict=True) if each.success or (0 < least <= each.reward and not failed)]


def _imitate(work: Workspace, name: str, episodes: Sequence[Trajectory], start: str | Path) -> None:
    """Train `models/NAME` on these episodes. The weights that do best on the validation tasks are kept."""
    s, options, watched = work.settings, dict[str, Any](), set[str]()
    steps = s.base_steps or min(max(PASSES * len(episodes) // s.batch_size, FEWEST), MOST)
    best = BestPolicy(work, _name_of_best(work, name))
    if _can_evaluate(work, name):
        options["evaluate"] = partial(_evaluate, work, name, best, steps)
    else:  # the loss on a tenth of the tasks decides, where there are ten
        ids = list(dict.fromkeys(each.task.id for each in episodes))
        watched = set(ids[: len(ids) // 10])
    to_rows = partial(work.world.policy_rows, tokenizer=tokenizer_of(start), max_new_tokens=s.policy_tokens)
    if held_out := [each for each in episodes if each.task.id in watched]:
        options["held_out"] = to_rows(held_out)
    rows = to_rows([each for each in episodes if each.task.id not in watched])
    fine_tune(work, f"{name} policy", start, f"{name}-last", rows, steps=steps, **options)
    last = work.models / f"{name}-last"
    shutil.rmtree(work.models / name, ignore_errors=True)
    (best.folder if best.folder.exists() else last).rename(work.models / name)
    shutil.rmtree(last, ignore_errors=True)
    for row in work.replay_buffer.metrics(best.run):
        work.say(_advice(name, int(row["successes"]), len(work.validation_tasks())))


def _advice(name: str, successes: int, tasks: int) -> str:
    """A sentence on what these successes of imitation mean for a dream."""
    if not successes:
        then = "episodes that all fail teach a dream nothing, so import more successes, or take a larger model"
    elif successes == tasks:
        then = "there is nothing left on them that a dream could add"
    else:
        then = "train() may add to it, and prove() tells whether it did"
    return f"the {name} policy wins {successes} of {tasks} validation tasks: {then}"


def _name_of_best(work: Workspace, name: str) -> str:
    """The best policy's folder. The killed attempt's where that goes on from a checkpoint, else a new one."""
    run = work.run_name(f"stage/{name}/best")
    before = next((row["folder"] for row in work.replay_buffer.metrics(run)), None)
    if before is not None and any((work.out / "checkpoints" / f"{name}-last").glob("*.pt")):
        return str(before)
    for left in work.models.glob(f"{name}-*"):
        shutil.rmtree(left)
    work.replay_buffer.record_metrics(run, 0, {"folder": (new := f"{name}-{uuid4().hex[:8]}")})
    return new


def _can_evaluate(work: Workspace, name: str) -> bool:
    """True if validation tasks can choose among a training's weights. Else it says why not.

    Raises `ConfigurationError` where only a dream could judge it, and there is no experience model yet.
    """
    reason, real = "", work.settings.real_budget != 0
    if not work.validation_tasks():
        reason = "there is no task of the split 'validation' (dataclasses.replace(task, split='validation') gives it one)"
    elif not real and work.settings.references_only:
        reason = "real_budget=0 plays no validation task on real tools, and under references_only no dream judges one"
    elif not real and not work.can_dream:
        raise ConfigurationError(
            f"real_budget=0 evaluates the base policy in the dream, and {work.out} holds no experience model: call "
            "train_experience() first, or give real_budget"
        )
    if reason:
        work.say(f"{reason}: the loss on a tenth of the tasks decides which weights of the {name} policy are kept")
    return not reason


def _evaluate(work: Workspace, label: str, best: BestPolicy, steps: int, model: Any, tokenizer: Any, step: int) -> None:
    """Play the validation tasks `EVALUATIONS` times while the policy is trained, and keep the best.

    Success is real unless `real_budget` is 0, else in the dream.
    """
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    if step % -(-steps // EVALUATIONS) and step != steps:
        return
    policy = LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=work.settings.policy_tokens)
    kind, dream = ("real", None) if work.settings.real_budget != 0 else ("dream", work.dream())
    name = f"validate/{best.name}" if dream is None else f"validate/{best.name}/dream"
    episodes = check_played(work.play(name, policy, work.validation_tasks(), iteration=step, dream=dream))
    successes = sum(trajectory.success for trajectory in episodes)
    best.offer(step, successes, sum(t.reward for t in episodes) / max(len(episodes), 1), policy)
    only = "" if dream is None else " (dreamed only)"
    work.say(f"{label} policy after {step} of {steps} steps: {kind} {successes}/{len(episodes)}{only}")


def _successes(work: Workspace) -> list[Trajectory]:
    """Offline successes without an invalid action. Raises `ConfigurationError` if there is none."""
    offline = work.offline()
    work.check_outcomes("a base policy imitates successes")
    successes = [trajectory for trajectory in offline if trajectory.success and not trajectory.invalid_actions]
    if not successes:
        raise ConfigurationError(
            f"no offline trajectory of {len(offline)} is a success without an invalid action: there is nothing to fine-tune a "
            "base policy on; collect some, by the start policy perhaps (episodes={'start': 50}), import some, or give train() "
            "a policy that is good enough already"
        )
    return successes
