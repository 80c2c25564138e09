"""The gate before training: whether the dream rewards what it must, and not what it must not, by episodes new to it."""

import json
from collections.abc import Collection, Sequence
from itertools import accumulate
from random import Random

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import ConfigurationError, UntruthfulDream
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.workspace import REFRESH, Workspace
from dreamgym_lg.fidelity.edits import edited_successes
from dreamgym_lg.fidelity.judgement import Judgement, ajudge, keys_of
from dreamgym_lg.statistics import Rate
from dreamgym_lg.tasks import is_tool_task
from dreamgym_lg.types import Task, Trajectory

FEW_JUDGED = 20
"""From fewer episodes no dream is refused: what the figure says is said, and training begins."""
LIMIT = 50
"""Episodes of each kind that a dream is judged by, at most."""
RUN = "fidelity"
MOST_MISSED = 0.8
"""Share of the real successes that a dream may fail to pay: refused is one whose 95 % interval is wholly above."""
_KINDS = 4
"""Of the episodes that are asked about."""
_LARGE = 200
"""Episodes of each kind at most where 50 do not tell whether a dream is above `max_false_success`."""


def measure(work: Workspace, dream: Dream, *, limit: int = LIMIT) -> Judgement:
    """The dream's verdicts on recorded episodes; measured anew only for another dream or other episodes.

    Put to it are, each `limit` at most: recorded failures, recorded successes, edits of them (`edited_successes`), and the
    policy's own real episodes, all of which its model was not trained on. A world of free text is asked about every step of
    what must not be rewarded: there they are so many, drawn from all of these, as take about 4 times `limit` questions.
    """
    _check_models(work, dream)
    work.check_settings()
    writes = work.world.writing_tools(work.replay_buffer)
    episodes = _chosen(work, writes, limit)
    key = f"{dream.version}/{keys_of(episodes)}/{'/'.join(FIGURES)}"  # one stored with other figures is measured again
    stored = next(iter(work.replay_buffer.metrics(work.run_name(RUN))), {})
    if stored.get("key") == key:
        return Judgement.from_dict(json.loads(stored["judgement"]))
    done = 0

    def on_episode() -> None:
        nonlocal done
        done += 1
        work.progress("fidelity of the dream", done, len(episodes))

    for model in (part for part in dream.responders if isinstance(part, Model)):
        model.retrieve(episodes)
    judgement = run_lasting(ajudge(dream, episodes, writes=writes, on_episode=on_episode))
    figures = {name: rate.value for name in FIGURES if (rate := getattr(judgement, name)) is not None}
    work.replay_buffer.record_metrics(
        work.run_name(RUN), 0, {"key": key, "judgement": json.dumps(judgement.to_dict()), **figures}
    )
    return judgement


def _check_models(work: Workspace, dream: Dream) -> None:
    if any(part.model is None for part in dream.responders if isinstance(part, Model)):
        raise ConfigurationError(f"{work.out} holds no experience model yet: call train_experience() first")


FIGURES = ("false_success", "false_failure", "invalid_recall", "same_lookup", "lookup_after_write")


def check_truthful(work: Workspace) -> None:
    """Raise `UntruthfulDream` if the dream pays more of what it must not than `Settings.max_false_success` allows, or next
    to no real success.

    A figure above it whose interval holds the limit is measured again on more episodes, as far as there are more.
    Of fewer than FEW_JUDGED such episodes the figure is only said. Nothing is measured where the limit is None, and where
    another judge than the experience model decides what an episode earns (`Settings.references_only`, `World.judged_by_dream`).
    """
    limit = work.settings.max_false_success
    if limit is None or work.settings.references_only or not work.world.judged_by_dream:
        return
    dream = work.dream()
    judgement = measure(work, dream)
    _check_successes_paid(work, dream, judgement.false_failure)
    rate = judgement.false_success
    if rate is not None and rate.value > limit and (rate.low <= limit or rate.episodes < FEW_JUDGED):  # it may be chance
        judgement = measure(work, dream, limit=_LARGE)
        rate = judgement.false_success
    if rate is None:
        work.say(
            "whether the dream pays what it must not is unknown: there is no recorded failure, and no tool agent's success to "
            "edit, that its experience model was not trained on. Import failed traces"
        )
        return
    said = f"the dream pays {rate.successes} of {rate.episodes} episodes that must not be paid: {rate}"
    if rate.value <= limit:
        missed = judgement.false_failure
        also = "" if missed is None else f"; of {missed.episodes} real successes it misses {missed.successes}"
        work.say(f"{said}{also}")
        return
    worst = max(judgement.by_kind.items(), key=lambda item: item[1].value)
    said += f" (most of {worst[0]}: {worst[1].successes} of {worst[1].episodes}), above max_false_success={limit:g}"
    if rate.episodes < FEW_JUDGED:
        work.say(f"{said}. These are too few episodes to refuse the dream; watch the gap to real episodes")
        return
    tasks = work.tasks("train")
    judged = sum(map(dream.decides_by_traces, tasks))
    only = (
        f"Train with references_only=True (`dreamgym train --references-only`) on the {judged} of {len(tasks)} tasks that "
        "recorded successes judge. "
    )
    raise UntruthfulDream(
        f"{said}. A policy trained there learns what it is wrongly paid for. {only if judged else ''}Give the experience model "
        "more failures (import failed traces, annotate them, train it on them and on edited successes), or take a better one; "
        "or train nonetheless with max_false_success=None (`dreamgym train --force`), best with refresh_episodes=40, which "
        "shows a local experience model that many real episodes at each refresh, or with real_budget=, which measures the gap "
        "to reality"
    )


def _check_successes_paid(work: Workspace, dream: Dream, missed: Rate | None) -> None:
    """Raise `UntruthfulDream` where hardly any success would be paid, so that a policy could learn nothing.

    It is only said of a world whose recorded successes judge some tasks in the experience model's place.
    """
    if missed is None or missed.episodes < FEW_JUDGED or missed.low <= MOST_MISSED:
        return
    said = (
        f"the dream does not pay {missed.successes} of {missed.episodes} real successes: {missed}, with 95 % confidence more "
        f"than {MOST_MISSED:g} of them (an answer of the experience model that cannot be read pays nothing)"
    )
    tasks = work.tasks("train")
    if judged := sum(map(dream.decides_by_traces, tasks)):
        work.say(f"{said}. Only the {judged} of {len(tasks)} tasks that recorded successes judge teach anything there")
        return
    raise UntruthfulDream(
        f"{said}. A policy learns nothing where nothing is paid. Train the experience model longer (experience_steps=) or on "
        "more recorded successes, or take a better one; or train nonetheless with max_false_success=None (`dreamgym train "
        "--force`)"
    )


def trainable_tasks(work: Workspace) -> list[Task]:
    """The tasks to train on: all of the split `train`, with `references_only` those that recorded successes judge.

    Raises `ConfigurationError` if there is none of these.
    """
    tasks = work.tasks("train")
    if not work.settings.references_only:
        return tasks
    if not work.world.judged_by_dream:
        raise ConfigurationError(
            "references_only=True, and the dreamed episodes of this world are judged by its own check (of a DreamGym: "
            "verify_dream=), never by the experience model: leave references_only away"
        )
    dream = work.dream(own_process=False)
    judged = [task for task in tasks if dream.decides_by_traces(task)]
    if not judged:
        raise ConfigurationError(
            f"references_only=True, and recorded successes decide the outcome of none of the {len(tasks)} training tasks: "
            "import successful traces whose tools write (name these tools in writes=), or leave references_only away"
        )
    work.say(f"trains on the {len(judged)} of {len(tasks)} tasks that recorded successes judge")
    return judged


def _chosen(work: Workspace, writes: Collection[str], limit: int) -> list[Trajectory]:
    """Recorded failures, recorded successes, edits of them, and the policy's real episodes, as `measure` says."""
    world, buffer, seed = work.world, work.replay_buffer, work.settings.seed
    held_out = work.held_out_offline()
    for split in ("validation", "test"):
        held_out += buffer.trajectories(source="offline", split=split, errors=False)
    keys = {_key(each) for each in held_out}
    # an edit is told from a success by all of them, those that the model was trained on too
    successes = world.as_dreamed([each for each in {_key(t): t for t in [*work.offline(), *held_out]}.values() if each.success])
    unseen = [each for each in successes if _key(each) in keys]
    tasks = {each.task.id for each in unseen}
    by_tools = [each for each in successes if is_tool_task(each.task)]
    edits = [each for each in edited_successes(by_tools, writes=writes, seed=seed) if each.task.id in tasks]
    failures = [each for each in held_out if not each.success and each.steps]
    trained_on = work.run_name(REFRESH)
    played = buffer.trajectories(source="real", errors=False)
    own = [each for each in played if each.steps and each.run.startswith(work.run_name("")) and each.run != trained_on]
    rng = Random(seed)
    recorded = world.as_dreamed([*_drawn(failures, limit, rng), *_drawn(own, limit, rng)])
    chosen = [*recorded, *_drawn(unseen, limit, rng), *_drawn(edits, limit, rng)]
    rng.shuffle(chosen)
    questions = accumulate(1 if each.success or is_tool_task(each.task) else len(each.steps) for each in chosen)
    return [each for each, total in zip(chosen, questions, strict=True) if total <= _KINDS * limit]


def _key(trajectory: Trajectory) -> tuple[str, int, str, int]:
    return trajectory.run, trajectory.iteration, trajectory.task.id, trajectory.rollout_index


def _drawn(episodes: Sequence[Trajectory], limit: int, rng: Random) -> list[Trajectory]:
    return rng.sample(episodes, min(limit, len(episodes)))
