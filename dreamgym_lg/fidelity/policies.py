"""The same policy in dream and reality, and the actions of its dreamed successes played in the real environment."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from dreamgym_lg.environment import CreateEnvironment, Environment, aplay_action
from dreamgym_lg.statistics import Rate, intervals_apart, normalised, rate
from dreamgym_lg.types import Step, Trajectory

Parting = Literal["none", "hidden", "verdict"]
"""Where dream and reality first part: nowhere; in the observation alone, which the dream may have been free to choose (or
only worded otherwise); in a verdict - validity, reward or end."""

_SIDES = {"real", "dream"}
_CASES = 12
MEANS_LITTLE = 0.2
"""Share of replays that part in the observation alone, from which on the success of replays says little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One policy at one moment, on the same tasks in dream and reality."""

    policy: str
    iteration: int
    real: Rate
    dream: Rate

    @property
    def gap(self) -> float:
        """Dream minus real: how much the dream flatters."""
        return self.dream.value - self.real.value

    @property
    def apart(self) -> bool:
        return intervals_apart((self.real.low, self.real.high), (self.dream.low, self.dream.high))


def compare_success_rates(trajectories: Sequence[Trajectory]) -> tuple[Comparison, ...]:
    """Compare the success rates of policies that were recorded both in the dream and in the real environment.

    Runs belong together that have the same name but for a part `real` or `dream`, the same iteration and policy version.
    Only tasks that were played in both count; a failed rollout counts as no success.
    """
    found: dict[tuple[str, int, str], dict[bool, list[Trajectory]]] = defaultdict(lambda: {True: [], False: []})
    for each in trajectories:
        if each.source != "offline":
            key = _policy(each.run), each.iteration, each.policy_version
            found[key][each.source == "real"].append(each)
    rows = []
    for (policy, iteration, version), worlds in found.items():
        shared = {each.task.id for each in worlds[True]} & {each.task.id for each in worlds[False]}
        real, dream = (rate(e.success for e in worlds[world] if e.task.id in shared) for world in (True, False))
        if real and dream:
            name = " ".join(part for part in (policy, version) if part)
            rows.append(Comparison(policy=name, iteration=iteration, real=real, dream=dream))
    return tuple(rows)


def _policy(run: str) -> str:
    return "/".join(part for part in run.split("/") if part.partition("@")[0] not in _SIDES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One dreamed success, played in the real environment."""

    task: str
    run: str
    success: bool
    parting: Parting
    number: int | None
    """The step at which the worlds first part, from 1."""
    action: str
    dreamed: str
    real: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DreamToReal:
    """Dreamed successes whose actions were played in the real environment, and what that is worth."""

    succeeded: Rate | None
    partings: dict[Parting, int]
    succeeded_unless_hidden: Rate | None
    """Among those that did not first part in the observation alone."""
    cases: tuple[Replayed, ...]
    """The first that did not succeed."""
    failed: tuple[str, ...]
    """What broke: replays that count nowhere."""
    synthetic: int
    """Dreamed successes on synthetic tasks, to which no real world belongs: not replayed."""

    @property
    def means_little(self) -> bool:
        """Whether the dream chose too much of the world for this figure to say whether its successes are real."""
        hidden = self.partings["hidden"]
        return bool(self.succeeded) and hidden >= MEANS_LITTLE * sum(self.partings.values())


async def dream_to_real(
    dreamed: Sequence[Trajectory],
    create_environment: CreateEnvironment,
    *,
    concurrency: int = 8,
    on_replay: Callable[[], None] = lambda: None,
) -> DreamToReal:
    """Play the actions of `dreamed` (successes; others are ignored) in real environments. Spends their real steps."""
    successes = [trajectory for trajectory in dreamed if trajectory.success]
    real = [trajectory for trajectory in successes if trajectory.task.origin == "real"]
    slots = asyncio.Semaphore(concurrency)

    async def one(trajectory: Trajectory) -> Replayed | str:
        played: Replayed | str
        async with slots:
            try:
                with closing(create_environment()) as environment:
                    await environment.areset(trajectory.task)
                    played = await _play(environment, trajectory)
            except Exception as error:  # one broken world is that replay's fault, not the others'
                played = f"{trajectory.task.id}: {type(error).__name__}: {error}"
        on_replay()
        return played

    done = await asyncio.gather(*map(one, real))
    replays = [each for each in done if isinstance(each, Replayed)]
    return DreamToReal(
        succeeded=rate(each.success for each in replays),
        partings={kind: sum(each.parting == kind for each in replays) for kind in ("none", "hidden", "verdict")},
        succeeded_unless_hidden=rate(each.success for each in replays if each.parting != "hidden"),
        cases=tuple([each for each in replays if not each.success][:_CASES]),
        failed=tuple(each for each in done if isinstance(each, str)),
        synthetic=len(successes) - len(real),
    )


async def _play(environment: Environment, trajectory: Trajectory) -> Replayed:
    seen, success = [trajectory.task.observation], False
    parting: Parting = "none"
    at: tuple[int | None, str, str, str] = (None, "", "", "")
    for position, step in enumerate(trajectory.steps, start=1):
        real, success = await aplay_action(environment, step.action, seen[-1])
        seen.append(real.next_observation)
        if parting == "none" and (kind := _parting(step, real)) != "none":
            parting, at = kind, (position, step.action, step.next_observation, real.next_observation)
        if real.terminated or real.truncated:
            break
    number, action, dreamed_observation, real_observation = at
    return Replayed(
        task=trajectory.task.id,
        run=trajectory.run,
        success=success,
        parting=parting,
        number=number,
        action=action,
        dreamed=dreamed_observation,
        real=real_observation,
    )


def _parting(dreamed: Step, real: Step) -> Parting:
    same = (dreamed.valid, dreamed.terminated) == (real.valid, real.terminated)
    if not same or abs(dreamed.reward - real.reward) > 0.01:
        return "verdict"
    return "none" if normalised(dreamed.next_observation) == normalised(real.next_observation) else "hidden"
