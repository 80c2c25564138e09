"""`measure`: everything that a report says of a dream, from the trajectories of a replay buffer."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.dream.model import Model
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.fidelity.evaluations import compare_success_rates, find_leaks
from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.fidelity.records import Fidelity, Group
from dreamgym_lg.fidelity.replay import Answered, Replay, answer_forced, replay_free
from dreamgym_lg.fidelity.steps import drift, one_step
from dreamgym_lg.hosted.chat_model import name_of
from dreamgym_lg.progress import OnProgress, counter
from dreamgym_lg.types import Trajectory

GROUPS = {"offline": "offline data", "real": "the policy's own actions"}


async def ameasure(
    dream: Dream,
    trajectories: Iterable[Trajectory],
    *,
    group: Callable[[Trajectory], str] = lambda each: GROUPS[each.source],
    limit: int | None = 100,
    seed: int = 0,
    concurrency: int = 32,
    judgement: Judgement | None = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = lambda *_: None,
) -> Fidelity:
    """Measure how far a dream can be trusted, on held-out trajectories.

    Trajectories of source `offline` and `real` are replayed in it step by step, the traces of their own task left out; those of
    source `synthetic` are compared with the same policy's real ones. The same input gives the same result.

    Args:
        dream: The very object in which a policy is trained.
        group: The kind of a real trajectory; by default offline data and the policy's own actions, by its source.
        limit: Episodes drawn of each group, at most; None for all.
        concurrency: Steps predicted at once.
        judgement: The same dream's verdicts (`ajudge`), for the report.
        notes: Printed in the report, such as where the trajectories come from.
        on_progress: Called with a label, the number done and the total.

    Raises whatever the model's server raises. An answer that cannot be read is a wrong answer, no error.
    """
    model = next((part for part in dream.responders if isinstance(part, Model)), Model(None))
    trajectories = list(trajectories)
    real = [each for each in trajectories if each.source != "synthetic"]
    playable = [each for each in real if each.error is None and each.steps]
    slots, groups = asyncio.Semaphore(concurrency), list[Group]()
    for name, members in _grouped(playable, group).items():
        episodes = _sample(members, limit, Random(f"{seed}/{name}"))
        model.retrieve(episodes)
        groups.append(await _group(dream, name, episodes, len(members), slots, on_progress))
    return Fidelity(
        experience_model=name_of(model.model) if model.model is not None else "none",
        version=dream.version,
        retrieved=model.k,
        retrieves=model.retrieves,
        left_out=len(real) - len(playable),
        groups=tuple(groups),
        comparisons=compare_success_rates(trajectories),
        judgement=judgement,
        leaks=find_leaks(model.replay_buffer),
        notes=tuple(notes),
    )


def measure(dream: Dream, trajectories: Iterable[Trajectory], **options: Any) -> Fidelity:
    """As `ameasure`, for code without an event loop."""
    return run_lasting(ameasure(dream, trajectories, **options))


def _grouped(trajectories: Sequence[Trajectory], group: Callable[[Trajectory], str]) -> Mapping[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for each in trajectories:
        groups.setdefault(group(each), []).append(each)
    return groups


def _sample(episodes: Sequence[Trajectory], limit: int | None, rng: Random) -> list[Trajectory]:
    """At most `limit` of the episodes, in their order."""
    if limit is None or len(episodes) <= limit:
        return list(episodes)
    return [episodes[index] for index in sorted(rng.sample(range(len(episodes)), limit))]


async def _group(
    dream: Dream, name: str, episodes: Sequence[Trajectory], of: int, slots: asyncio.Semaphore, on_progress: OnProgress
) -> Group:
    count = counter(on_progress, name, len(episodes))

    async def one(trajectory: Trajectory) -> tuple[list[Answered], Replay]:
        both = await answer_forced(dream, trajectory, slots), await replay_free(dream, trajectory, slots)
        count()
        return both

    answers = await asyncio.gather(*map(one, episodes))
    forced = [each for steps, _ in answers for each in steps]
    return Group(
        name=name,
        episodes=len(episodes),
        of=of,
        rewarded=any(each.step.reward for each in forced),
        one_step=one_step([steps for steps, _ in answers]),
        drift=drift(forced, [replay for _, replay in answers if replay.answered]),
    )
