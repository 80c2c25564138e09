"""`measure`: everything that a report says of an experience model, from the trajectories of a replay buffer."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from random import Random
from typing import Any

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.environment import CheckAction, CreateEnvironment
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.experience.hosted import name_of
from dreamgym_lg.experience.model import ExperienceModel
from dreamgym_lg.fidelity.ask import ABLATIONS, Ablation, Answered, Asker, Replay
from dreamgym_lg.fidelity.figures import Mean
from dreamgym_lg.fidelity.findings import Finding, findings
from dreamgym_lg.fidelity.leak import Leaks, find_leaks
from dreamgym_lg.fidelity.policies import Comparison, DreamToReal, compare, dream_to_real
from dreamgym_lg.fidelity.rubric import Rubric, check_other, judge_episodes
from dreamgym_lg.fidelity.steps import Drift, OneStep, drift, one_step
from dreamgym_lg.fidelity.theorem import Theorem, theorem
from dreamgym_lg.statistics import Rate
from dreamgym_lg.types import Trajectory

OnProgress = Callable[[str, int, int], None]
"""(what, how many done, of how many)."""

GROUPS = {"offline": "offline data", "real": "the policy's own actions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One kind of real trajectories, as one variant of the experience model answers them."""

    name: str
    episodes: int
    of: int
    """Episodes of this kind there were; `episodes` of them were drawn."""
    refused: int
    """Steps that `check_action` refuses in dream and reality alike: not asked, in no figure."""
    one_step: OneStep
    drift: Drift
    theorem: Theorem | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The experience model as it is (`without` None) or without one of its inputs."""

    without: Ablation | None
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """What is known of an experience model. What was not measured is None or empty, never a number."""

    experience_model: str
    version: str
    retrieved: int
    """Demonstrations shown with every step."""
    retrieves: bool
    """Whether there is a real transition of a train task to retrieve."""
    left_out: int
    """Real trajectories that failed to be played or have no step."""
    variants: tuple[Variant, ...]
    """The first is the model as it is; empty without a real trajectory."""
    comparisons: tuple[Comparison, ...]
    dream_to_real: DreamToReal | None
    rubric: Rubric | None
    leaks: Leaks | None
    notes: tuple[str, ...]

    @property
    def grounded(self) -> bool:
        """Whether there was a real trajectory to measure against."""
        return bool(self.variants)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Those of the experience model as it is."""
        return self.variants[0].groups if self.variants else ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What to read first, worst first."""
        return findings(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable: a rate as successes, n, value, low and high; None for what was not measured."""
        return {"grounded": self.grounded, "findings": _plain(self.findings), **_plain(self)}


def measure(experience: ExperienceModel, trajectories: Iterable[Trajectory], **options: Any) -> Fidelity:
    """`ameasure`, for code that has no event loop."""
    return run_lasting(ameasure(experience, trajectories, **options))


async def ameasure(
    experience: ExperienceModel, trajectories: Iterable[Trajectory], *, group: Callable[[Trajectory], str] | None = None,
    limit: int | None = 100, check_action: CheckAction | None = None, without: Sequence[Ablation] = (),
    create_environment: CreateEnvironment | None = None, judge_model: BaseChatModel | None = None, judge_limit: int = 20,
    seed: int = 0, concurrency: int = 32, notes: Sequence[str] = (), on_progress: OnProgress = lambda *_: None,
) -> Fidelity:  # fmt: skip
    """Measure `experience` on held-out `trajectories`: those of source `offline` and `real` are put to it, those of source
    `synthetic` are compared with the same policy's real ones, replayed and judged. The same input gives the same result.

    Args:
        group: What kind a real trajectory is of; by default offline data and the policy's own actions, by its source.
        limit: Episodes drawn of each group, and dreamed successes replayed, at most; None for all.
        check_action: The environment's own check; what it refuses reaches no experience model.
        without: Ablations, measured beside the model as it is; each asks as much again.
        create_environment: Creates real environments; dreamed successes are then replayed there (this spends real steps).
        judge_model: Scores `judge_limit` dreamed episodes by the four rubrics; never the experience model itself.
        concurrency: Questions asked at once.
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
    variants, replays, asked = [], [], []
    for ablation in dict.fromkeys([None, *without]) if usable else ():
        asker = Asker(experience, asyncio.Semaphore(concurrency), check_action, ablation)
        measured = [await _group(asker, name, chosen, of, on_progress) for name, (chosen, of) in drawn.items()]
        variants.append(Variant(without=ablation, groups=tuple(each for each, _, _ in measured)))
        if ablation is None:
            replays = [replay for _, _, found in measured for replay in found]
            asked = [(replay.real.task, each.step) for replay in replays for each in replay.answered]
    dreamed = [each for each in given if each.source == "synthetic" and each.error is None and each.steps]
    return Fidelity(
        experience_model=name_of(experience.model),
        version=experience.version,
        retrieved=experience.k,
        retrieves=bool(experience.k and experience.replay_buffer and experience.replay_buffer.count("steps", split="train")),
        left_out=len(real) - len(usable),
        variants=tuple(variants),
        comparisons=compare(given),
        dream_to_real=await _replayed(dreamed, create_environment, limit, rng, concurrency, on_progress),
        rubric=await _judged(judge_model, dreamed or [each.dreamed for each in replays], judge_limit, rng, on_progress),
        leaks=find_leaks(experience, asked),
        notes=tuple(notes),
    )


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


async def _group(
    asker: Asker, name: str, chosen: Sequence[Trajectory], of: int, on_progress: OnProgress
) -> tuple[Group, list[Answered], list[Replay]]:
    asker.experience.retrieve(chosen)
    label, done = f"{name}, without {asker.without}" if asker.without else name, 0

    async def one(trajectory: Trajectory) -> tuple[list[Answered], Replay]:
        nonlocal done
        both = await asker.forced(trajectory), await asker.free(trajectory)
        done += 1
        on_progress(label, done, len(chosen))
        return both

    answers = await asyncio.gather(*map(one, chosen))
    forced = [each for found, _ in answers for each in found]
    replays = [replay for _, replay in answers if replay.answered]
    figures = one_step(forced)
    refused = sum(len(trajectory.steps) for trajectory in chosen) - len(forced)
    rewards = [each.step.reward for each in forced]
    return (
        Group(
            name=name, episodes=len(chosen), of=of, refused=refused, one_step=figures,
            drift=drift(forced, replays), theorem=theorem(figures, rewards),
        ),
        forced,
        replays,
    )  # fmt: skip


async def _replayed(
    dreamed: Sequence[Trajectory], create_environment: CreateEnvironment | None, limit: int | None, rng: Random,
    concurrency: int, on_progress: OnProgress,
) -> DreamToReal | None:  # fmt: skip
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


def _plain(value: Any) -> Any:
    if isinstance(value, Rate):
        return {"successes": value.successes, "n": value.episodes, "value": value.value, "low": value.low, "high": value.high}
    if isinstance(value, (Mean, Finding)):
        return value._asdict()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
