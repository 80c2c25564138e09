"""`measure`: everything that a report says of a dream, from the trajectories of a replay buffer."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from random import Random
from typing import Any, ParamSpec, TypeVar

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.dream.model import Model
from dreamgym_lg.environment import CreateEnvironment
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.fidelity.conclusions import draw_conclusions
from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.fidelity.leak import find_leaks
from dreamgym_lg.fidelity.policies import DreamToReal, compare_success_rates, dream_to_real
from dreamgym_lg.fidelity.records import Fidelity, Group
from dreamgym_lg.fidelity.replay import Answered, Replay, answer_forced, replay_free
from dreamgym_lg.fidelity.rubric import Rubric, check_other, judge_episodes
from dreamgym_lg.fidelity.steps import drift, one_step
from dreamgym_lg.hosted.chat_model import name_of
from dreamgym_lg.types import Trajectory

P = ParamSpec("P")
Result = TypeVar("Result")
OnProgress = Callable[[str, int, int], None]
"""(label, how many done, of how many)."""

GROUPS = {"offline": "offline data", "real": "the policy's own actions"}


async def ameasure(
    dream: Dream,
    trajectories: Iterable[Trajectory],
    *,
    group: Callable[[Trajectory], str] | None = None,
    limit: int | None = 100,
    create_environment: CreateEnvironment | None = None,
    judge_model: BaseChatModel | None = None,
    judge_limit: int = 20,
    seed: int = 0,
    concurrency: int = 32,
    judgement: Judgement | None = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = lambda *_: None,
) -> Fidelity:
    """Measure how far a dream can be trusted, on held-out trajectories.

    Trajectories of source `offline` and `real` are put to it step by step, the traces of their own task left out; those of
    source `synthetic` are compared with the same policy's real ones, replayed and judged. The same input gives the same
    result. Every interval is a 95 % one; those over steps are `clustered_interval`'s, which allows for the steps of one
    episode being alike.

    Args:
        dream: The very object in which a policy is trained.
        group: The kind of a real trajectory; by default offline data and the policy's own actions, by its source.
        limit: Episodes drawn of each group, and dreamed successes replayed, at most; None for all.
        create_environment: Creates real environments; dreamed successes are then replayed there (this spends real steps).
        judge_model: Scores `judge_limit` dreamed episodes by the four rubrics; never the experience model itself.
        concurrency: Questions asked at once.
        judgement: The same dream's verdicts (`ajudge`), for the report.
        notes: Printed in the report, such as where the trajectories come from.

    Raises `ConfigurationError` for a judge that is the experience model; whatever the model's server raises. An answer that
    cannot be read is a wrong answer, no error.
    """
    model = next((part for part in dream.responders if isinstance(part, Model)), Model(None))
    if judge_model is not None:
        check_other(judge_model, model.model)
    given = list(trajectories)
    real = [each for each in given if each.source != "synthetic"]
    usable = [each for each in real if each.error is None and each.steps]
    drawn, rng = _drawn(usable, group or (lambda each: GROUPS[each.source]), limit, seed), Random(f"{seed}/dreamed")
    slots = asyncio.Semaphore(concurrency)
    groups, replays = list[Group](), list[Replay]()
    for name, (chosen, of) in drawn.items():
        model.retrieve(chosen)
        measured, replayed = await _group(dream, name, chosen, of, slots, on_progress)
        groups.append(measured)
        replays += replayed
    dreamed = [each for each in given if each.source == "synthetic" and each.error is None and each.steps]
    fidelity = Fidelity(
        experience_model=name_of(model.model) if model.model is not None else "none",
        version=dream.version,
        retrieved=model.k,
        retrieves=model.retrieves,
        left_out=len(real) - len(usable),
        groups=tuple(groups),
        comparisons=compare_success_rates(given),
        judgement=judgement,
        dream_to_real=await _replayed(dreamed, create_environment, limit, rng, concurrency, on_progress),
        rubric=await _judged(judge_model, dreamed or [each.dreamed for each in replays], judge_limit, rng, on_progress),
        leaks=find_leaks(model.replay_buffer, [(each.real.task, [of.step for of in each.answered]) for each in replays]),
        notes=tuple(notes),
    )
    return replace(fidelity, conclusions=draw_conclusions(fidelity))


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
) -> Mapping[str, tuple[list[Trajectory], int]]:
    """For each group its episodes that are put to the dream, in their order, and how many there were."""
    groups: dict[str, list[Trajectory]] = {}
    for each in usable:
        groups.setdefault(group(each), []).append(each)
    return {name: (_sample(members, limit, Random(f"{seed}/{name}")), len(members)) for name, members in groups.items()}


def _sample(episodes: Sequence[Trajectory], limit: int | None, rng: Random) -> list[Trajectory]:
    if limit is None or len(episodes) <= limit:
        return list(episodes)
    return [episodes[index] for index in sorted(rng.sample(range(len(episodes)), limit))]


async def _group(
    dream: Dream, name: str, chosen: Sequence[Trajectory], of: int, slots: asyncio.Semaphore, on_progress: OnProgress
) -> tuple[Group, list[Replay]]:
    done = 0

    async def one(trajectory: Trajectory) -> tuple[list[Answered], Replay]:
        nonlocal done
        both = await answer_forced(dream, trajectory, slots), await replay_free(dream, trajectory, slots)
        done += 1
        on_progress(name, done, len(chosen))
        return both

    answers = await asyncio.gather(*map(one, chosen))
    episodes = [forced for forced, _ in answers]
    forced = [each for episode in episodes for each in episode]
    replays = [replay for _, replay in answers if replay.answered]
    measured = Group(
        name=name,
        episodes=len(chosen),
        of=of,
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
    chosen = _sample([each for each in dreamed if each.success], limit, rng)
    on_replay = _counter("dreamed successes in the real environment", len(chosen), on_progress)
    return await dream_to_real(chosen, create_environment, concurrency=concurrency, on_replay=on_replay)


async def _judged(
    judge: BaseChatModel | None, dreamed: Sequence[Trajectory], limit: int, rng: Random, on_progress: OnProgress
) -> Rubric | None:
    if judge is None:
        return None
    chosen = _sample([each for each in dreamed if each.steps], limit, rng)
    return await judge_episodes(judge, chosen, on_episode=_counter("judge", len(chosen), on_progress))


def _counter(label: str, total: int, on_progress: OnProgress) -> Callable[[], None]:
    """Reports one more done, each time it is called."""
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        on_progress(label, done, total)

    return count
