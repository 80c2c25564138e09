"""The gate before training: it measures each part of a dream; the worst decides."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import accumulate
from random import Random
from typing import Any, get_args

from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.dream.goals import has_user_turns
from dreamgym_lg.dream.users import model_user
from dreamgym_lg.errors import ConfigurationError, UntruthfulDream
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experiment.supervised import check_outcomes
from dreamgym_lg.experiment.workspace import MIN_CASES, TRAIN, Workspace
from dreamgym_lg.fidelity.edits import edited_successes
from dreamgym_lg.fidelity.judgement import (
    INVALID,
    LOOKUP,
    MISSED,
    REAL_FAILURES,
    WRITTEN,
    Judgement,
    ajudge,
    keys_of,
    questions,
)
from dreamgym_lg.fidelity.users import AGAINST, EARLY, EVADED, INVENTED, LATE, UNTOLD
from dreamgym_lg.progress import counter
from dreamgym_lg.statistics import Rate
from dreamgym_lg.tasks import is_tool_task
from dreamgym_lg.types import Split, Task, Trajectory

MAX_ERROR = 0.5
"""Share of the real successes that a judge may miss. And of a responder's cases of one kind that it may get wrong."""
MAX_USER_ERROR = 0.2
"""Share of a user's cases of one kind (`fidelity.users`) that it may get wrong."""
LIMIT = 50
"""Episodes of each kind that a dream is measured on, at most."""
RUN = "fidelity"
_KINDS = 4
"""Kinds of episodes: recorded failures and successes, edits, and the policy's own."""
_LARGE_LIMIT = 200
"""Episodes of each kind at most where 50 do not tell an error from chance."""


def measure(work: Workspace, dream: Dream, *, limit: int = LIMIT) -> Judgement:
    """The dream's verdicts on recorded episodes. Measured anew for another dream or other episodes.

    Measures up to `limit` episodes of each kind: recorded failures, recorded successes, edits of them (`edited_successes`), and
    the policy's own real episodes. The dream's model was trained on none of them. A text world is asked about each step of
    a failure, about 4 x `limit` questions in all.
    """
    models = [part for part in dream.responders if isinstance(part, Model)]
    if any(part.model is None for part in models):
        raise ConfigurationError(f"{work.out} holds no experience model yet: call train_experience() first")
    work.check_settings()
    writes = work.world.writing_tools(work.replay_buffer)
    episodes = _sample_episodes(work, writes, limit)
    # one stored with other figures, or with other writing tools, is measured again
    key = f"{keys_of(episodes)}/{_goals(dream, episodes)}/{','.join(sorted(writes))}/parts-6"
    stored = work.record(RUN)
    if _is_same(work, dream, stored) and stored.get("key") == key:
        return Judgement.from_dict(json.loads(stored["judgement"]))
    if dream.hosted:
        work.say(f"the gate asks the hosted models of the dream about {_calls(dream, episodes, writes):,} questions")
    for model in models:
        model.retrieve(episodes)
    count = counter(work.progress, "fidelity of the dream", len(episodes))
    judgement = run_lasting(ajudge(dream, episodes, writes=writes, on_episode=count))
    work.keep_record(RUN, {"key": key, "versions": _versions(work, dream), "judgement": json.dumps(judgement.to_dict())})
    return judgement


def _is_same(work: Workspace, dream: Dream, stored: Mapping[str, Any]) -> bool:
    """True of a record of this very dream. A part without a version, such as code of the user's own, may have been mended."""
    return dream.versions is not None and stored.get("versions") == _versions(work, dream)


def _versions(work: Workspace, dream: Dream) -> str:
    """The dream's versions, with the number of corrected outcomes: recorded successes judge by them."""
    corrected = work.replay_buffer.corrections()
    return json.dumps(dream.versions and [*dream.versions, *([corrected] if corrected else [])])


def _goals(dream: Dream, episodes: Sequence[Trajectory]) -> str:
    """A digest of the users' goals. `write_goals` or a function of one's own may change them."""
    user = model_user(dream.user)
    goals = sorted(
        repr((each.task.id, user.goal(each.task).side)) for each in episodes if user is not None and has_user_turns(each)
    )
    return sha256("\n".join(goals).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def is_measured(work: Workspace) -> bool:
    """True where a judge of the dream or a language model's user decides anything."""
    return work.world.judged_by_dream or model_user(work.world.user) is not None


def check_truthful(work: Workspace, *, resumed: bool = False) -> None:
    """Measure the dream, and raise `UntruthfulDream` for a part that lies (`refusals`).

    Errors of fewer than `_LARGE_LIMIT` cases that may be chance are measured again on more. Nothing is measured where
    `max_false_success` is None, where no judge of the dream but recorded successes decides (`Settings.references_only`) or
    none at all (`World.judged_by_dream`), unless a language model plays its user, and, `resumed`, of a dream that was measured
    before and whose parts all name the same versions as then.

    With `Workspace.force` the errors are only said.
    """
    limit = work.settings.max_false_success
    dreamt = work.world.judged_by_dream and not work.settings.references_only
    if limit is None or not (dreamt or model_user(work.world.user) is not None):
        if limit is not None and not work.world.judged_by_dream and not resumed:
            work.say("the gate measures nothing: a check of your own judges dreamed episodes, and no recorded one can test it")
        return
    if dreamt:
        check_outcomes(work, "the gate measures the dream's verdicts by theirs")
    dream = work.dream()
    if resumed and _is_same(work, dream, work.record(RUN)):
        return
    judgement, roles = measure(work, dream), () if dreamt else ("user",)
    if list(refusals(judgement, limit, roles)):
        judgement = measure(work, dream, limit=_LARGE_LIMIT)
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
    only = (
        f"train with references_only=True (`dreamgym train --references-only`) on the {decided} of {len(tasks)} tasks that "
        "recorded successes judge; "
    )
    raise UntruthfulDream(
        f"{'; '.join(causes)}. {examples(judgement)}A policy learns what it is wrongly rewarded for. Import more real "
        "episodes, failures among them, train the experience model longer (experience_steps=) or take a better one; "
        f"{only if decided else ''}or train nonetheless with force=True (`dreamgym train --force`)"
    )


def refusals(judgement: Judgement, limit: float, roles: Collection[str] = ()) -> Iterator[str]:
    """The reasons against training in a dream, each of one part.

    Args: `limit`, of `Settings.max_false_success`; `roles`, of the parts that count; empty: all.

    A judge must not reward more than `limit` of any kind of failure nor miss more than `MAX_ERROR` of the real successes, and
    has to be measured on `MIN_CASES` of both if it is a language model. A responder must not err in more than `MAX_ERROR`
    of any kind, nor answer everything alike. A language model's user must not err in more than `MAX_USER_ERROR` of any kind,
    of `MIN_CASES` replies at least. Of fewer than `MIN_CASES` cases the lower end of the interval counts.
    """
    for part in (part for part in judgement.parts if not roles or part.role in roles):
        name = f"the {part.role} {part.name!r}"
        for kind, rate in part.errors.items():
            most = limit if kind not in _ERRORS else MAX_USER_ERROR if part.role == "user" else MAX_ERROR
            if (rate.value if rate.episodes >= MIN_CASES else rate.low) > most:
                above = f"{most:g}" if kind in _ERRORS else f"max_false_success={limit:g}"
                yield f"{name} {_in_words(kind, rate)}: {rate}, above {above}"
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
"""Errors that `max_false_success` does not limit, in words."""


def _in_words(kind: str, rate: Rate) -> str:
    return _ERRORS.get(kind, f"rewards {{}} {kind}").format(f"{rate.successes} of {rate.episodes}")


def summary(judgement: Judgement) -> str:
    """All measured errors of each part, in words."""
    parts = [
        f"the {part.role} {part.name!r} {', '.join(_in_words(kind, rate) for kind, rate in part.errors.items())}"
        for part in judgement.parts
        if part.errors
    ]
    return "; ".join(parts) or "no part of the dream could be measured"


def examples(judgement: Judgement) -> str:
    """The first example of each part's worst errors."""
    worst = (
        (rate.value, part.examples[kind][0])
        for part in judgement.parts
        for kind, rate in part.errors.items()
        if kind in part.examples
    )
    examples = [example for _, example in sorted(worst, reverse=True)[:3]]
    return f"For example: {'; '.join(examples)}. " if examples else ""


def _calls(dream: Dream, episodes: Sequence[Trajectory], writes: Collection[str]) -> int:
    """Number of calls of hosted models that measuring the dream takes."""
    counts = [questions(each, writes) for each in episodes]
    roles = (dream.responders, dream.judges, [dream.user])
    hosted = [sum(getattr(part, "hosted", None) is not None for part in parts) for parts in roles]
    return sum(number * parts for each in counts for number, parts in zip(each, hosted, strict=True))


def trainable_tasks(work: Workspace, *, real: bool = False) -> list[Task]:
    """The tasks to train on: the split `train`; with `references_only` those that recorded successes judge.

    Of learner `rft` those without a recorded success. `real` ones are never drawn: no real environment knows their entities.

    Raises `ConfigurationError` if there is none of these.
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
    """Those without a recorded success. In the `real` part of S2R, without a dreamed one either, as long as there are some."""

    def solved(episodes: Iterable[Trajectory]) -> set[str]:
        return {each.task.id for each in episodes if each.success and not each.invalid_actions}

    recorded = solved(work.offline())
    if not (unsolved := [task for task in tasks if task.id not in recorded]):
        raise ConfigurationError(
            f"learner='rft' plays tasks without a recorded success, and each of the {len(tasks)} training tasks has one: "
            "import failures too, or take another learner"
        )
    dreamed = solved(work.replay_buffer.trajectories(run=work.run_name(TRAIN), source="synthetic")) if real else set()
    return [task for task in unsolved if task.id not in dreamed] or unsolved


def _sample_episodes(work: Workspace, writes: Collection[str], limit: int) -> list[Trajectory]:
    """Recorded failures, recorded successes, edits of them, and the policy's real episodes, as `measure` says."""
    world, buffer, rng = work.world, work.replay_buffer, Random(work.settings.seed)
    held_out, own = work.held_out_offline(), {task.environment for split in get_args(Split) for task in work.tasks(split)}
    for split in ("validation", "test"):
        recorded = buffer.trajectories(source="offline", split=split, errors=False)
        held_out += [each for each in recorded if each.task.environment in own]
    keys = {_key(each) for each in held_out}
    # an edit is told from a success by all of them, those that the model was trained on too
    successes = world.as_dreamed([each for each in {_key(t): t for t in [*work.offline(), *held_out]}.values() if each.success])
    unseen = [each for each in successes if _key(each) in keys]
    tasks = {each.task.id for each in unseen}
    by_tools = [each for each in successes if is_tool_task(each.task)]
    edits = [each for each in edited_successes(by_tools, writes=writes, seed=work.settings.seed) if each.task.id in tasks]
    failures = [each for each in held_out if not each.success and each.steps and each.has_outcome]
    played: Iterable[Trajectory] = buffer.trajectories(source="real", errors=False)
    played = [t for t in played if t.steps and t.run.startswith(work.run_name(""))]
    real = world.as_dreamed([*_sample(failures, limit, rng), *_sample(played, limit, rng)])
    chosen = [*real, *_sample(unseen, limit, rng), *_sample(edits, limit, rng)]
    rng.shuffle(chosen)
    totals = accumulate(1 if each.success or is_tool_task(each.task) else len(each.steps) for each in chosen)
    return [each for each, total in zip(chosen, totals, strict=True) if total <= _KINDS * limit]


def _key(trajectory: Trajectory) -> tuple[str, int, str, int]:
    return trajectory.run, trajectory.iteration, trajectory.task.id, trajectory.rollout_index


def _sample(episodes: Sequence[Trajectory], limit: int, rng: Random) -> list[Trajectory]:
    return rng.sample(episodes, min(limit, len(episodes)))
