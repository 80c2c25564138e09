"""Baselines that a dream has to beat. Imitation, also filtered or of drawn tasks too, and offline RL."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.choice import BestPolicy, validation_panel
from dreamgym_lg.experiment.evaluation import FILTERED, OFFLINE_RL
from dreamgym_lg.experiment.start import begin_with, start_sampling, start_weights
from dreamgym_lg.experiment.supervised import check_outcomes, checkpoints_of, fine_tune, tokenizer_of
from dreamgym_lg.experiment.training import create_trl_learner
from dreamgym_lg.experiment.workspace import Workspace
from dreamgym_lg.learner import Groups, TrainingRow, advantage_weights, preference_pairs, sft_row
from dreamgym_lg.rollout import check_played
from dreamgym_lg.tasks import reference_episode
from dreamgym_lg.types import Trajectory

if TYPE_CHECKING:
    from dreamgym_lg.experiment.supervised import StartModel

BASELINES = ("sft", "sft-filtered", "dpo", "sft-drawn")
"""Names of the baselines (`Experiment.prepare`, `dreamgym train --baseline`)."""
PASSES, MIN_STEPS, MAX_STEPS = 12, 60, 600
"""Default passes over the imitated episodes, minimum and maximum optimiser steps. Measured with SmolLM2 on one desk."""
DPO_PASSES = 3
EVALUATIONS = 3
"""Evaluations of a policy while it is trained, at equal distances. The best is kept."""
FILTER = 0.75
"""Share of the highest recorded reward that an episode of the filtered policy must reach."""


def train_base_policy(work: Workspace, model: "StartModel" = None) -> None:
    """Train `models/base` on every recorded success."""
    episodes = recorded_successes(work)
    imitate(work, "base", episodes, begin_with(work, model))


def train_filtered_policy(work: Workspace) -> None:
    """Train `models/filtered` on `best_episodes`, with the start and procedure of the base policy.

    Trains nothing where the best episodes are the successes, which the base policy imitates already.
    """
    best = best_episodes(work.offline())
    number = 0 if all(trajectory.success for trajectory in best) else len(best)
    if number:
        imitate(work, "filtered", best, begin_with(work))
    else:
        work.say(f"no filtered imitation: no recorded episode but the successes earned {FILTER:.0%} of the highest reward")
    work.keep_record(FILTERED, {"episodes": number})


def train_drawn_policy(work: Workspace) -> None:
    """Train `models/drawn` on recorded successes and references of drawn tasks."""
    episodes = recorded_successes(work) + [reference_episode(task) for task in work.tasks("train") if task.drawn]
    imitate(work, "drawn", Random(work.settings.seed).sample(episodes, len(episodes)), begin_with(work))


def best_episodes(recorded: Sequence[Trajectory]) -> list[Trajectory]:
    """Successes and episodes with `FILTER` of the highest reward, without an invalid action.

    Episodes whose last action failed the task are left out: that action must not be imitated.
    """
    clean = [trajectory for trajectory in recorded if trajectory.steps and not trajectory.invalid_actions]
    least = FILTER * max((trajectory.reward for trajectory in clean), default=0.0)
    failed = [each.steps[-1].terminated and each.steps[-1].reward <= 0 for each in clean]
    return [each for each, lost in zip(clean, failed, strict=True) if each.success or (0 < least <= each.reward and not lost)]


def train_offline_policy(work: Workspace) -> None:
    """Train `models/offline_rl` on all recorded episodes with an outcome, and report the method.

    The method is DPO from the base policy if pairs of a better and a worse episode of one task fill an optimiser step. Else it
    is advantage-weighted imitation (`advantage_weights`) from the base policy's start: most logs hold one episode of a task.
    """
    if not (work.models / "base").exists():
        raise ConfigurationError(f"{work.out} holds no base policy: call train_base() first")
    start = start_weights(work)
    episodes = with_segments(work, [each for each in work.offline() if each.steps and each.has_outcome], start)
    by_task = attrgetter("task.id")
    groups = [list(group) for _, group in groupby(sorted(episodes, key=by_task), key=by_task)]
    pairs, returns, how = len(preference_pairs(groups)), [each.reward for each in episodes], ""
    if 2 * pairs >= work.settings.batch_size:
        subset, used = _limit_pairs(work, groups)
        how = f"DPO on {used} of {pairs} pairs of a better and a worse episode of one task"
        _train_dpo(work, "offline_rl", subset, used)
    elif len(set(returns)) > 1:
        how = f"advantage-weighted imitation of {len(episodes)} episodes ({pairs} pairs for DPO)"
        imitate(work, "offline_rl", episodes, start, advantage_weights(returns))
    work.say(f"offline RL: {how}" if how else "no offline RL: all recorded episodes with an outcome earned the same")
    work.keep_record(OFFLINE_RL, {"how": how})


def _limit_pairs(work: Workspace, groups: Groups) -> tuple[Groups, int]:
    """Groups drawn by the seed, and their number of pairs. `DPO_PASSES` over them take about as many steps as imitation."""
    most = (work.settings.base_steps or MAX_STEPS) * work.settings.batch_size / (2 * DPO_PASSES)
    subset, pairs = list[Sequence[Trajectory]](), 0
    for group in Random(work.settings.seed).sample(groups, len(groups)):
        if pairs < most and (more := len(preference_pairs([group]))):
            subset, pairs = [*subset, group], pairs + more
    return subset, pairs


def with_segments(work: Workspace, episodes: Sequence[Trajectory], start: str | Path) -> list[Trajectory]:
    """The episodes with their tokens as segments. Episodes that do not replay are left out and reported."""
    tokenizer, tokenized, cause = tokenizer_of(start), list[Trajectory](), ""
    options = {"max_new_tokens": work.settings.policy_tokens, **_rendering(work)}
    for each in episodes:
        try:
            rows = work.world.policy_rows([each], tokenizer, **options)
        except ConfigurationError as error:
            cause = str(error)
        else:
            tokenized.append(replace(each, segments=[row.segment for row in rows]))
    if cause:
        work.say(
            f"{len(episodes) - len(tokenized)} of {len(episodes)} episodes do not replay and are left out; the last: {cause}"
        )
    return tokenized


def _rendering(work: Workspace) -> dict[str, Any]:
    """The start's `chat_template_kwargs` for `World.policy_rows`, if any. A user's world may not take them."""
    return {name: value for name, value in start_sampling(work).items() if name == "chat_template_kwargs"}


def _train_dpo(work: Workspace, name: str, groups: Groups, pairs: int) -> None:
    """Train `models/NAME` from the base policy by DPO, `DPO_PASSES` times over all pairs. Resumes after a crash."""
    policy, last = work.policy("base"), f"{name}-last"
    segments = [segment for group in groups for episode in group for segment in episode.segments]
    checkpoints = checkpoints_of(work, last, work.models / "base", DPO_PASSES, segments)
    best = BestPolicy(work, _name_of_best(work, name))
    evaluated = _can_evaluate(work, name, "the last step decides")
    settings = replace(work.settings, learner="dpo", num_generations=2, learning_rate=None, beta=None)
    learner = create_trl_learner(policy, checkpoints, settings, updates=-(-2 * pairs // settings.batch_size))

    def evaluate() -> None:
        if evaluated and learner.iteration:
            _evaluate(work, name, best, DPO_PASSES, policy.model, policy.tokenizer, learner.iteration)

    evaluate()  # of a resumed training, in case that it was interrupted
    while learner.iteration < DPO_PASSES:
        learner.update(groups)
        work.progress(f"{name} policy", learner.iteration, DPO_PASSES)
        evaluate()
    policy.save(work.models / last)
    shutil.rmtree(checkpoints)
    _keep_best(work, name, best)


def imitate(
    work: Workspace, name: str, episodes: Sequence[Trajectory], start: str | Path, weights: Sequence[float] = ()
) -> None:
    """Train `models/NAME` on these episodes. The weights that do best on the validation tasks are kept.

    Args: `weights`, one per episode; these episodes have segments, which become their rows.
    """

    def to_rows(subset: Sequence[Trajectory]) -> list[TrainingRow]:
        if not weights:
            return work.world.policy_rows(subset, tokenizer_of(start), max_new_tokens=s.policy_tokens, **_rendering(work))
        return [sft_row(segment, weight_of[each.reward]) for each in subset for segment in each.segments]

    s, options, held_out_ids = work.settings, dict[str, Any](), set[str]()
    weight_of = {each.reward: weight for each, weight in zip(episodes, weights, strict=False)}
    effective_number = sum(weights) ** 2 / sum(weight**2 for weight in weights) if weights else len(episodes)
    steps = s.base_steps or min(max(int(PASSES * effective_number) // s.batch_size, MIN_STEPS), MAX_STEPS)
    work.say(f"{name} policy: {len(episodes)} episodes, {steps} steps of {s.batch_size}; it begins with {start}")
    if not (evaluated := _can_evaluate(work, name, "the loss on a tenth of the tasks decides")):  # where there are ten
        ids = list(dict.fromkeys(each.task.id for each in episodes))
        held_out_ids = set(ids[: len(ids) // 10])
    if held_out := [each for each in episodes if each.task.id in held_out_ids]:
        options["held_out"] = to_rows(held_out)
    rows = to_rows([each for each in episodes if each.task.id not in held_out_ids])
    checkpoints_of(work, f"{name}-last", start, steps, [row.segment for row in rows])
    best = BestPolicy(work, _name_of_best(work, name))
    if evaluated:
        options["evaluate"] = partial(_evaluate, work, name, best, steps)
    options["sampling"] = start_sampling(work) or None
    fine_tune(work, f"{name} policy", start, f"{name}-last", rows, steps=steps, **options)
    _keep_best(work, name, best)


def _keep_best(work: Workspace, name: str, best: BestPolicy) -> None:
    """Move the best weights, or without validation the last ones, to `models/NAME`."""
    last = work.models / f"{name}-last"
    shutil.rmtree(work.models / name, ignore_errors=True)
    (best.folder if best.folder.exists() else last).rename(work.models / name)
    shutil.rmtree(last, ignore_errors=True)
    if best.figures:
        successes, tasks = int(best.figures["successes"]), len(work.validation_tasks())
        work.say(f"the {name} policy wins {successes} of {tasks} validation tasks")


def _name_of_best(work: Workspace, name: str) -> str:
    """Folder name of the best policy. An interrupted attempt with a checkpoint (`checkpoints_of`) keeps its name."""
    recorded = work.record(record := f"stage/{name}/best").get("folder")
    if recorded is not None and any((work.out / "checkpoints" / f"{name}-last").glob("*.pt")):
        return str(recorded)
    for obsolete in work.models.glob(f"{name}-*"):
        shutil.rmtree(obsolete)
    work.keep_record(record, {"folder": (new := f"{name}-{uuid4().hex[:8]}"), "validation": validation_panel(work)})
    return new


def _can_evaluate(work: Workspace, name: str, otherwise: str) -> bool:
    """True if validation tasks can choose among a training's weights. Otherwise reports the reason and `otherwise`.

    Raises `ConfigurationError` if validation needs a dream and there is no experience model yet.
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
        work.say(f"{reason}: {otherwise} which weights of the {name} policy are kept")
    return not reason


def _evaluate(work: Workspace, label: str, best: BestPolicy, steps: int, model: Any, tokenizer: Any, step: int) -> None:
    """At each of the `EVALUATIONS` steps, play the validation tasks and keep the best policy.

    Episodes are real unless `real_budget` is 0, else dreamed.
    """
    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    if step % -(-steps // EVALUATIONS) and step != steps:
        return
    policy = LocalChatModel(
        model=model, tokenizer=tokenizer, max_new_tokens=work.settings.policy_tokens, **start_sampling(work)
    )
    kind, dream = ("real", None) if work.settings.real_budget != 0 else ("dream", work.dream())
    name = f"validate/{best.name}" if dream is None else f"validate/{best.name}/dream"
    episodes = check_played(work.play(name, policy, work.validation_tasks(), iteration=step, dream=dream))
    successes = sum(trajectory.success for trajectory in episodes)
    best.offer(step, successes, sum(t.reward for t in episodes) / max(len(episodes), 1), policy)
    only = "" if dream is None else " (dreamed only)"
    work.say(f"{label} policy after {step} of {steps} steps: {kind} {successes}/{len(episodes)}{only}")


def recorded_successes(work: Workspace) -> list[Trajectory]:
    """Offline successes without an invalid action. Raises `ConfigurationError` if there is none."""
    offline = work.offline()
    check_outcomes(work, "a base policy imitates successes")
    successes = [trajectory for trajectory in offline if trajectory.success and not trajectory.invalid_actions]
    if not successes:
        raise ConfigurationError(
            f"no offline trajectory of {len(offline)} is a success without an invalid action: there is nothing to fine-tune a "
            "base policy on; collect some, by the start policy perhaps (episodes={'start': 50}), import some, or give train() "
            "a policy that is good enough already"
        )
    return successes
