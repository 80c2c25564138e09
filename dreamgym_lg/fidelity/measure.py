"""`measure`: everything that a report says of a dream, from the trajectories of a replay buffer."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.dream.model import Model
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.fidelity.conclusions import draw_conclusions
from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.fidelity.leak import find_leaks
from dreamgym_lg.fidelity.policies import compare_success_rates
from dreamgym_lg.fidelity.records import Fidelity, Group
from dreamgym_lg.fidelity.replay import Answered, Replay, answer_forced, replay_free
from dreamgym_lg.fidelity.rubric import Rubric, check_other, judge_episodes
from dreamgym_lg.fidelity.steps import drift, one_step
from dreamgym_lg.hosted.chat_model import name_of
from dreamgym_lg.progress import OnProgress, counter
from dreamgym_lg.types import Trajectory

GROUPS = {"offline": "offline data", "real": "the policy's own actions"}
_SCORED = 20
"""Dreamed episodes that another model scores, at most."""


async def ameasure(
    dream: Dream,
    trajectories: Iterable[Trajectory],
    *,
    group: Callable[[Trajectory], str] = lambda each: GROUPS[each.source],
    limit: int | None = 100,
    judge_model: BaseChatModel | None = None,
    seed: int = 0,
    concurrency: int = 32,
    judgement: Judgement | None = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = lambda *_: None,
) -> Fidelity:
    """Measure how far a dream can be trusted, on held-out trajectories.

    Trajectories of source `offline` and `real` are put to it step by step, the traces of their own task left out; those of
    source `synthetic` are compared with the same policy's real ones, and scored. The same input gives the same result.

    Args:
        dream: The very object in which a policy is trained.
        group: The kind of a real trajectory; by default offline data and the policy's own actions, by its source.
        limit: Episodes drawn of each group, at most; None for all.
        judge_model: Scores dreamed episodes by the four rubrics; never the experience model itself.
        concurrency: Questions asked at once.
        judgement: The same dream's verdicts (`ajudge`), for the report.
        notes: Printed in the report, such as where the trajectories come from.
        on_progress: Called with a label, how many are done, and of how many.

    Raises `ConfigurationError` for a judge that is the experience model; whatever the model's server raises. An answer that
    cannot be read is a wrong answer, no error.
    """
    model = next((part for part in dream.responders if isinstance(part, Model)), Model(None))
    if judge_model is not None:
        check_other(judge_model, model.model)
    trajectories = list(trajectories)
    playable = [each for each in trajectories if each.error is None and each.steps]
    drawn = _drawn([each for each in playable if each.source != "synthetic"], group, limit, seed)
    slots, groups, replays = asyncio.Semaphore(concurrency), list[Group](), list[Replay]()
    for name, (chosen, of) in drawn.items():
        model.retrieve(chosen)
        measured, replayed = await _group(dream, name, chosen, of, slots, on_progress)
        groups.append(measured)
        replays += replayed
    dreamed = [each for each in playable if each.source == "synthetic"] or [each.dreamed for each in replays]
    fidelity = Fidelity(
        experience_model=name_of(model.model) if model.model is not None else "none",
        version=dream.version,
        retrieved=model.k,
        retrieves=model.retrieves,
        left_out=sum(each.source != "synthetic" for each in trajectories) - sum(of for _, of in drawn.values()),
        groups=tuple(groups),
        comparisons=compare_success_rates(trajectories),
        judgement=judgement,
        rubric=await _scored(judge_model, dreamed, Random(f"{seed}/dreamed"), on_progress) if judge_model is not None else None,
        leaks=find_leaks(model.replay_buffer, (each.real.task for each in replays)),
        notes=tuple(notes),
    )
    return replace(fidelity, conclusions=draw_conclusions(fidelity))


def measure(dream: Dream, trajectories: Iterable[Trajectory], **options: Any) -> Fidelity:
    """As `ameasure`, for code without an event loop."""
    return run_lasting(ameasure(dream, trajectories, **options))


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
    count = counter(on_progress, name, len(chosen))

    async def one(trajectory: Trajectory) -> tuple[list[Answered], Replay]:
        both = await answer_forced(dream, trajectory, slots), await replay_free(dream, trajectory, slots)
        count()
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


async def _scored(judge: BaseChatModel, dreamed: Sequence[Trajectory], rng: Random, on_progress: OnProgress) -> Rubric | None:
    chosen = _sample([each for each in dreamed if each.steps], _SCORED, rng)
    return await judge_episodes(judge, chosen, on_episode=counter(on_progress, "judge", len(chosen)))
