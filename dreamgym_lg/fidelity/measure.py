"""`measure`: everything that a report says of an experience model, from the trajectories of a replay buffer."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from random import Random
from typing import Any, ParamSpec, TypeVar

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.environment import CheckAction, CreateEnvironment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experience.grounding import Grounds
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.fidelity.ask import ABLATIONS, Ablation, Answered, Asker, Replay
from dreamgym_lg.fidelity.conclusions import draw_conclusions
from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.fidelity.leak import find_leaks
from dreamgym_lg.fidelity.policies import DreamToReal, compare_success_rates, dream_to_real
from dreamgym_lg.fidelity.records import Fidelity, Group, Variant
from dreamgym_lg.fidelity.rubric import Rubric, check_other, judge_episodes
from dreamgym_lg.fidelity.steps import drift, one_step
from dreamgym_lg.hosted.chat_model import name_of
from dreamgym_lg.types import Trajectory

P = ParamSpec("P")
Result = TypeVar("Result")
OnProgress = Callable[[str, int, int], None]
"""(what, how many done, of how many)."""

GROUPS = {"offline": "offline data", "real": "the policy's own actions"}


async def ameasure(
    experience: ExperienceModel,
    trajectories: Iterable[Trajectory],
    *,
    group: Callable[[Trajectory], str] | None = None,
    limit: int | None = 100,
    check_action: CheckAction | None = None,
    grounding: Grounds | None = None,
    without: Sequence[Ablation] = (),
    create_environment: CreateEnvironment | None = None,
    judge_model: BaseChatModel | None = None,
    judge_limit: int = 20,
    seed: int = 0,
    concurrency: int = 32,
    judgement: Judgement | None = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = lambda *_: None,
) -> Fidelity:
    """Measure how far an experience model can be trusted, on held-out trajectories.

    Trajectories of source `offline` and `real` are put to it step by step; those of source `synthetic` are compared with the
    same policy's real ones, replayed and judged. The same input gives the same result. Every interval is a 95 % one; those
    over steps are `clustered_interval`'s, which allows for the steps of one episode being alike.

    Args:
        group: What kind a real trajectory is of; by default offline data and the policy's own actions, by its source.
        limit: Episodes drawn of each group, and dreamed successes replayed, at most; None for all.
        check_action: The environment's own check; what it refuses reaches no experience model.
        grounding: What real traces decide in the dream; the report says of each part how often its rewards were right.
        without: Ablations, measured beside the model as it is; each asks as much again.
        create_environment: Creates real environments; dreamed successes are then replayed there (this spends real steps).
        judge_model: Scores `judge_limit` dreamed episodes by the four rubrics; never the experience model itself.
        concurrency: Questions asked at once.
        judgement: What the same model's dream pays (`ajudge`), for the report.
        notes: Printed in the report, such as where the trajectories come from.

    Raises `ConfigurationError` for an unknown ablation and for a judge that is the experience model; whatever the model's
    server raises. An answer that cannot be read is a wrong answer, no error.
    """
    for name in without:
        if name not in ABLATIONS:
            raise ConfigurationError.unknown("ablation", name, ABLATIONS)
    if judge_model is not None:
        check_other(judge_model, experience.model)
    given = list(trajectories)
    real = [each for each in given if each.source != "synthetic"]
    usable = [each for each in real if each.error is None and each.steps]
    drawn, rng = _drawn(usable, group or (lambda each: GROUPS[each.source]), limit, seed), Random(f"{seed}/dreamed")
    if grounding is not None:
        grounding.refresh()
    asker = Asker(experience, asyncio.Semaphore(concurrency), check_action, grounding=grounding)
    variants, replays = await _variants(asker, drawn, without, on_progress)
    dreamed = [each for each in given if each.source == "synthetic" and each.error is None and each.steps]
    found = Fidelity(
        experience_model=name_of(experience.model),
        version=experience.version,
        retrieved=experience.k,
        retrieves=experience.grounded,
        left_out=len(real) - len(usable),
        variants=variants,
        comparisons=compare_success_rates(given),
        judgement=judgement,
        dream_to_real=await _replayed(dreamed, create_environment, limit, rng, concurrency, on_progress),
        rubric=await _judged(judge_model, dreamed or [each.dreamed for each in replays], judge_limit, rng, on_progress),
        leaks=find_leaks(experience, [(each.real.task, [of.step for of in each.answered]) for each in replays]),
        notes=tuple(notes),
    )
    return replace(found, conclusions=draw_conclusions(found))


def _blocking(function: Callable[P, Coroutine[Any, Any, Result]]) -> Callable[P, Result]:
    """The same function for code that has no event loop."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        return run_lasting(function(*args, **kwargs))

    call.__name__ = function.__name__.removeprefix("a")
    return call


measure = _blocking(ameasure)


def _drawn(
    usable: Sequence[Trajectory], group: Callable[[Trajectory], str], limit: int | None, seed: int
) -> dict[str, tuple[list[Trajectory], int]]:
    """For each group its episodes that are put to the model, in their order, and how many there were."""
    groups: dict[str, list[Trajectory]] = {}
    for each in usable:
        groups.setdefault(group(each), []).append(each)
    return {name: (_sample(found, limit, Random(f"{seed}/{name}")), len(found)) for name, found in groups.items()}


def _sample(found: Sequence[Trajectory], limit: int | None, rng: Random) -> list[Trajectory]:
    if limit is None or len(found) <= limit:
        return list(found)
    return [found[place] for place in sorted(rng.sample(range(len(found)), limit))]


async def _variants(
    asker: Asker,
    drawn: Mapping[str, tuple[Sequence[Trajectory], int]],
    without: Sequence[Ablation],
    on_progress: OnProgress,
) -> tuple[tuple[Variant, ...], list[Replay]]:
    """The experience model as it is, then under each ablation; and the replays in the dream as it is."""
    variants, replays = list[Variant](), list[Replay]()
    for ablation in dict.fromkeys([None, *without]) if drawn else ():
        varied = asker._replace(without=ablation)
        measured = [await _group(varied, name, chosen, of, on_progress) for name, (chosen, of) in drawn.items()]
        variants.append(Variant(without=ablation, groups=tuple(each for each, _ in measured)))
        if ablation is None:
            replays = [replay for _, found in measured for replay in found]
    return tuple(variants), replays


async def _group(
    asker: Asker, name: str, chosen: Sequence[Trajectory], of: int, on_progress: OnProgress
) -> tuple[Group, list[Replay]]:
    asker.experience.retrieve(chosen)
    label, done = f"{name}, without {asker.without}" if asker.without else name, 0

    async def one(trajectory: Trajectory) -> tuple[list[Answered], Replay]:
        nonlocal done
        both = await asker.forced(trajectory), await asker.free(trajectory)
        done += 1
        on_progress(label, done, len(chosen))
        return both

    answers = await asyncio.gather(*map(one, chosen))
    episodes = [forced for forced, _ in answers]
    forced = [each for episode in episodes for each in episode]
    replays = [replay for _, replay in answers if replay.answered]
    measured = Group(
        name=name,
        episodes=len(chosen),
        of=of,
        refused=sum(len(trajectory.steps) for trajectory in chosen) - len(forced),
        rewarded=any(each.step.reward for each in forced),
        one_step=one_step(episodes),
        drift=drift(forced, replays),
    )
    return measured, replays


async def _replayed(
    dreamed: Sequence[Trajectory],
    create_environment: CreateEnvironment | None,
    limit: int | None,
    rng: Random,
    concurrency: int,
    on_progress: OnProgress,
) -> DreamToReal | None:
    if create_environment is None:
        return None
    chosen, done = _sample([each for each in dreamed if each.success], limit, rng), 0

    def on_replay() -> None:
        nonlocal done
        done += 1
        on_progress("dreamed successes in the real environment", done, len(chosen))

    return await dream_to_real(chosen, create_environment, concurrency=concurrency, on_replay=on_replay)


async def _judged(
    judge: BaseChatModel | None, dreamed: Sequence[Trajectory], limit: int, rng: Random, on_progress: OnProgress
) -> Rubric | None:
    if judge is None:
        return None
    chosen, done = _sample([each for each in dreamed if each.steps], limit, rng), 0

    def on_episode() -> None:
        nonlocal done
        done += 1
        on_progress("judge", done, len(chosen))

    return await judge_episodes(judge, chosen, on_episode=on_episode)
