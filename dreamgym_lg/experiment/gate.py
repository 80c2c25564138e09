"""The gate before training: it measures each part of a dream; the worst decides."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import accumulate
from random import Random
from typing import Any

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.dream.goals import has_user_turns
from dreamgym_lg.dream.users import model_user
from dreamgym_lg.errors import ConfigurationError, UntruthfulDream
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.workspace import MIN_CASES, TRAIN, Workspace
from dreamgym_lg.fidelity.edits import edited_successes
from dreamgym_lg.fidelity.judgement import (
    INVALID,
    LOOKUP,
    MISSED,
    REAL_FAILURES,
    WRITTEN,
    Judgement,
    PartJudgement,
    ajudge,
    keys_of,
    questions,
)
from dreamgym_lg.fidelity.users import AGAINST, EARLY, EVADED, INVENTED, LATE, UNTOLD
from dreamgym_lg.progress import counter
from dreamgym_lg.statistics import Rate
from dreamgym_lg.tasks import is_tool_task
from dreamgym_lg.types import Task, Trajectory

MAX_ERROR = 0.5
"""Largest share of real successes that a judge may miss, and of one kind of cases that a responder may get wrong."""
MAX_USER_ERROR = 0.2
"""Largest share of one kind of cases (`fidelity.users`) that a user may get wrong."""
LIMIT = 50
"""Maximum episodes of each kind that a dream is measured on."""
RUN = "fidelity"
_KINDS = 4
"""Kinds of episodes: recorded failures and successes, edits, and the policy's own."""
_LARGE = 200
"""Maximum episodes of each kind in the second measurement, which checks errors that may be chance."""


def measure(work: Workspace, dream: Dream, *, limit: int = LIMIT) -> Judgement:
    """The dream's verdicts on recorded episodes. Measured anew only for another dream or other episodes.

    The episodes, at most `limit` of each kind, are recorded failures, recorded successes, edits of these (`edited_successes`)
    and the policy's own real episodes. The experience model was trained on none of them. In a text world each step of a failure
    is a question, about 4 x `limit` questions in all.
    """
    models = [part for part in dream.responders if isinstance(part, Model)]
    if any(part.model is None for part in models):
        raise ConfigurationError(f"{work.out} holds no experience model yet: call train_experience() first")
    work.check_settings()
    writes = work.world.writing_tools(work.replay_buffer)
    episodes = _sample_episodes(work, writes, limit)
    # raise the number in `parts-6` when the stored figures change
    key = f"{keys_of(episodes)}/{_goals_digest(dream, episodes)}/{','.join(sorted(writes))}/parts-6"
    stored = work.record(RUN)
    if _has_same_versions(dream, stored) and stored.get("key") == key:
        return Judgement.from_dict(json.loads(stored["judgement"]))
    if dream.hosted:
        work.say(f"the gate asks the hosted models of the dream about {_count_calls(dream, episodes, writes):,} questions")
    for model in models:
        model.retrieve(episodes)
    count = counter(work.progress, "fidelity of the dream", len(episodes))
    judgement = run_lasting(ajudge(dream, episodes, writes=writes, on_episode=count))
    work.keep_record(RUN, {"key": key, "versions": json.dumps(dream.versions), "judgement": json.dumps(judgement.to_dict())})
    return judgement


def _has_same_versions(dream: Dream, stored: Mapping[str, Any]) -> bool:
    """True if the record is of this dream. False for a part without a version, such as the user's code, which may change."""
    return dream.versions is not None and stored.get("versions") == json.dumps(dream.versions)


def _goals_digest(dream: Dream, episodes: Sequence[Trajectory]) -> str:
    """A digest of the users' goals, which `write_goals` or the user's own function may change."""
    user = model_user(dream.user)
    goals = sorted(
        repr((each.task.id, user.goal(each.task).side)) for each in episodes if user is not None and has_user_turns(each)
    )
    return sha256("\n".join(goals).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_measured(work: Workspace) -> bool:
    """True if the gate measures something: judges of the dream, or a language model's user."""
    return work.world.judged_by_dream or model_user(work.world.user) is not None


def check_truthful(work: Workspace, *, resumed: bool = False) -> None:
    """Measure the dream, and raise `UntruthfulDream` for a part that lies (`refusals`).

    If a part lies, all are measured again on up to `_LARGE` episodes of each kind. Nothing is measured if `max_false_success`
    is None, if neither judges of the dream decide (`Settings.references_only`, `World.judged_by_dream`) nor a language model
    plays its user, or if training is `resumed` and the parts have the versions that were measured before.

    With `Workspace.force` the errors are only reported.
    """
    limit = work.settings.max_false_success
    judges_decide = work.world.judged_by_dream and not work.settings.references_only
    if limit is None or not (judges_decide or model_user(work.world.user) is not None):
        return
    if judges_decide:
        work.check_outcomes("the gate measures the dream's verdicts by theirs")
    dream = work.dream()
    if resumed and _has_same_versions(dream, work.record(RUN)):
        return
    judgement, roles = measure(work, dream), () if judges_decide else ("user",)
    if list(refusals(judgement, limit, roles)):
        judgement = measure(work, dream, limit=_LARGE)
    work.say(summary(judgement))
    if not (causes := list(refusals(judgement, limit, roles))):
        return
    if work.force:
        work.say(
            f"force=True: {'; '.join(causes)}. A policy learns what it is wrongly rewarded for; watch the gap to real episodes"
        )
        return
    tasks = work.tasks("train")
    decided = sum(map(dream.decides_by_traces, tasks))
    alternative = (
        f"train with references_only=True (`dreamgym train --references-only`) on the {decided} of {len(tasks)} tasks that "
        "recorded successes judge; "
    )
    raise UntruthfulDream(
        f"{'; '.join(causes)}. {examples(judgement)}A policy learns what it is wrongly rewarded for. Import more real "
        "episodes, failures among them, train the experience model longer (experience_steps=) or take a better one; "
        f"{alternative if decided else ''}or train nonetheless with force=True (`dreamgym train --force`)"
    )


def refusals(judgement: Judgement, limit: float, roles: Collection[str] = ()) -> Iterator[str]:
    """The reasons against training in a dream, each about one part.

    * A judge must not reward more than `limit` of any kind of failure, nor miss more than `MAX_ERROR` of the real successes. A
      language model has to be measured on `MIN_CASES` of both.
    * A responder must not err in more than `MAX_ERROR` of the cases of any kind, nor answer everything alike.
    * A language model's user must not err in more than `MAX_USER_ERROR` of any kind, and be measured on `MIN_CASES` replies.

    With fewer than `MIN_CASES` cases of a kind, the lower end of the interval is compared.

    Args: `limit`, as `Settings.max_false_success`; `roles`, of the parts that count; empty: all.
    """
    for part in (part for part in judgement.parts if not roles or part.role in roles):
        name = f"the {part.role} {part.name!r}"
        for kind, rate in part.errors.items():
            largest, error = (MAX_ERROR, _ERRORS[kind]) if kind in _ERRORS else (limit, f"rewards {{}} {kind}")
            largest = MAX_USER_ERROR if part.role == "user" else largest
            if (rate.value if rate.episodes >= MIN_CASES else rate.low) > largest:
                above = f"max_false_success={limit:g}" if kind not in _ERRORS else f"{largest:g}"
                yield f"{name} {error.format(_count(rate))}: {rate}, above {above}"
        if part.role == "user" and (replies := part.cases(EARLY, LATE)) < MIN_CASES:
            yield f"{name} was measured on {replies} replies; fewer than {MIN_CASES} prove nothing: import conversations"
        if part.alike:
            yield f"{name} answers everything alike"
        failures, successes = part.cases(*REAL_FAILURES), part.cases(MISSED)
        if part.role == "judge" and part.by_model and min(failures, successes) < MIN_CASES:
            yield (
                f"{name} was measured on {failures} real failures and {successes} real successes that its model was not "
                f"trained on; fewer than {MIN_CASES} of either prove nothing"
            )


_ERRORS = {
    MISSED: "does not reward {} " + MISSED,
    INVALID: "accepts {} " + INVALID,
    LOOKUP: "answers {} " + LOOKUP + " differently",
    WRITTEN: "does not show what is new in {} " + WRITTEN,
    INVENTED: "gives {} " + INVENTED,
    UNTOLD: "does not tell {} " + UNTOLD,
    EARLY: "ends {} " + EARLY,
    LATE: "does not end {} " + LATE,
    AGAINST: "gives {} " + AGAINST,
    EVADED: "does not answer {} " + EVADED,
}
"""Wording of the kinds of errors that `max_false_success` does not limit. `{}` is a count, such as `3 of 20`."""


def _count(rate: Rate) -> str:
    return f"{rate.successes} of {rate.episodes}"


def summary(judgement: Judgement) -> str:
    def sentence(part: PartJudgement) -> str:
        errors = (_ERRORS.get(kind, f"rewards {{}} {kind}").format(_count(rate)) for kind, rate in part.errors.items())
        return f"the {part.role} {part.name!r} {', '.join(errors)}"

    return "; ".join(sentence(part) for part in judgement.parts if part.errors) or "no part of the dream could be measured"


def examples(judgement: Judgement) -> str:
    """An example of each of the three most frequent kinds of errors."""
    worst = (
        (rate.value, part.examples[kind][0])
        for part in judgement.parts
        for kind, rate in part.errors.items()
        if kind in part.examples
    )
    examples = [example for _, example in sorted(worst, reverse=True)[:3]]
    return f"For example: {'; '.join(examples)}. " if examples else ""


def _count_calls(dream: Dream, episodes: Sequence[Trajectory], writes: Collection[str]) -> int:
    """Number of calls of hosted models that measuring the dream takes."""
    counts = [questions(each, writes) for each in episodes]
    roles = (dream.responders, dream.judges, [dream.user])
    hosted = [sum(getattr(part, "hosted", None) is not None for part in parts) for parts in roles]
    return sum(number * parts for each in counts for number, parts in zip(each, hosted, strict=True))


def trainable_tasks(work: Workspace, *, real: bool = False) -> list[Task]:
    """The tasks to train on: the split `train`; with `references_only` those that recorded successes judge.

    Learner `rft` plays only tasks without a recorded success. With `real`, drawn tasks are left out: no real environment knows
    their entities.

    Raises `ConfigurationError` if no task is left.
    """
    tasks = work.tasks("train")
    if work.settings.learner == "rft":
        return _unsolved_tasks(work, [task for task in tasks if not task.drawn], real=real)
    if real:
        return [task for task in tasks if not task.drawn]
    if not work.settings.references_only:
        return tasks
    dream = work.dream()
    judged = [task for task in tasks if dream.decides_by_traces(task)]
    if not judged:
        raise ConfigurationError(
            f"references_only=True, and recorded successes decide the outcome of none of the {len(tasks)} training tasks: "
            "import successful traces whose tools write (name these tools in writes=), or leave references_only away"
        )
    which = f"{len(judged)} of {len(tasks)} tasks that recorded successes judge"
    work.say(f"trains on the {which}, by their calls and the facts of their messages: no judge reads what these say")
    return judged


def _unsolved_tasks(work: Workspace, tasks: Sequence[Task], *, real: bool) -> list[Task]:
    """The tasks without a recorded success. With `real`, also without a dreamed one, as long as some are left."""

    def solved_ids(episodes: Iterable[Trajectory]) -> set[str]:
        return {each.task.id for each in episodes if each.success and not each.invalid_actions}

    recorded = solved_ids(work.offline())
    if not (unsolved := [task for task in tasks if task.id not in recorded]):
        raise ConfigurationError(
            f"learner='rft' plays tasks without a recorded success, and each of the {len(tasks)} training tasks has one: "
            "import failures too, or take another learner"
        )
    dreamed = solved_ids(work.replay_buffer.trajectories(run=work.run_name(TRAIN), source="synthetic")) if real else set()
    return [task for task in unsolved if task.id not in dreamed] or unsolved


def _sample_episodes(work: Workspace, writes: Collection[str], limit: int) -> list[Trajectory]:
    """Recorded failures, recorded successes, edits of them, and the policy's real episodes, as `measure` says."""
    world, buffer, rng = work.world, work.replay_buffer, Random(work.settings.seed)
    held_out, environments = work.held_out_offline(), work.environments()
    for split in ("validation", "test"):
        recorded = buffer.trajectories(source="offline", split=split, errors=False)
        held_out += [each for each in recorded if each.task.environment in environments]
    keys = {_key(each) for each in held_out}
    # edits are made from all successes, as an edit must not equal any of them; then those of unseen tasks are kept
    successes = world.as_dreamed([each for each in {_key(t): t for t in [*work.offline(), *held_out]}.values() if each.success])
    unseen = [each for each in successes if _key(each) in keys]
    tasks = {each.task.id for each in unseen}
    by_tools = [each for each in successes if is_tool_task(each.task)]
    edits = [each for each in edited_successes(by_tools, writes=writes, seed=work.settings.seed) if each.task.id in tasks]
    failures = [each for each in held_out if not each.success and each.steps and each.has_outcome]
    played: Iterable[Trajectory] = buffer.trajectories(source="real", errors=False)
    played = [t for t in played if t.steps and t.run.startswith(work.run_name(""))]
    real = world.as_dreamed([*_sample(failures, limit, rng), *_sample(played, limit, rng)])
    sample = [*real, *_sample(unseen, limit, rng), *_sample(edits, limit, rng)]
    rng.shuffle(sample)
    totals = accumulate(1 if each.success or is_tool_task(each.task) else len(each.steps) for each in sample)
    return [each for each, total in zip(sample, totals, strict=True) if total <= _KINDS * limit]


def _key(trajectory: Trajectory) -> tuple[str, int, str, int]:
    return trajectory.run, trajectory.iteration, trajectory.task.id, trajectory.rollout_index


def _sample(episodes: Sequence[Trajectory], limit: int, rng: Random) -> list[Trajectory]:
    return rng.sample(episodes, min(limit, len(episodes)))
