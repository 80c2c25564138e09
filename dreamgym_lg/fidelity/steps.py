"""Share of right answers to real steps: one step at a time (teacher-forced), and over whole replays."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.fidelity.replay import Answered, Replay, answer_forced
from dreamgym_lg.statistics import Mean, Rate, StepRate, rate, step_mean, step_rate, token_f1
from dreamgym_lg.types import Trajectory

STATUSES = ("continues", "failure", "success")


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStep:
    """Teacher-forced: each real step predicted behind the real history. An unreadable answer is a wrong one."""

    steps: int
    episodes: int
    """How many episodes the steps are from."""
    unreadable: int
    normalised: StepRate | None
    """The same words: case, whitespace and punctuation do not count."""
    token_f1: Mean | None
    confusion: dict[str, dict[str, int]]
    """Real status -> dreamed status (or `unreadable`) -> number of steps."""
    success_recalled: StepRate | None
    """Of the steps that really completed the task, those that the dream, too, calls a success."""
    success_false: StepRate | None
    """Of the steps that the dream calls a success, those that really were none."""
    reward_right: StepRate | None
    """Rewards that differ from the real one by no more than 0.01."""
    right_by_part: dict[str, StepRate]
    """Steps right in words, end and reward, by the responder or judge that decided them."""
    reward_error: Mean | None
    """Mean |predicted - real| over readable answers: eps_R of the paper's Theorem 1, as a mean."""
    transition_error: StepRate | None
    """Steps whose next observation (normalised) or end differs or is unreadable: eps_P of the paper's Theorem 1, as a mean."""
    invalid_recall: StepRate | None
    invalid_precision: StepRate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """Observations right (normalised) at one step number, teacher-forced and teacher-free: one step an episode."""

    number: int
    forced: Rate | None
    free: Rate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Teacher-free: the recorded actions replayed in the dream, episode by episode."""

    episodes: int
    by_number: tuple[AtStep, ...]
    outcomes: dict[str, dict[str, int]]
    """Real `success` or `no success` -> dreamed -> episodes."""
    agreed: Rate | None
    success_recalled: Rate | None
    success_false: Rate | None
    """Of the episodes that succeed in the dream, those that did not in reality with the same actions."""
    ended_early: Rate | None
    """Episodes that the dream ended, rightly or not, before their recorded actions were played."""
    unreadable: int


async def measure_steps(
    dream: Dream, trajectories: Sequence[Trajectory], *, only_invalid: bool = False, concurrency: int = 32
) -> OneStep:
    """Predict the steps of real episodes behind their history. Args: `only_invalid`, really invalid actions alone."""
    slots = asyncio.Semaphore(concurrency)
    return one_step(await asyncio.gather(*(answer_forced(dream, t, slots, only_invalid=only_invalid) for t in trajectories)))


def one_step(episodes: Sequence[Sequence[Answered]]) -> OneStep:
    """The figures of all steps. Intervals allow for correlated steps of an episode."""

    def share(right: Callable[[Answered], bool], among: Callable[[Answered], bool] = lambda each: True) -> StepRate | None:
        return step_rate([[right(each) for each in episode if among(each)] for episode in episodes])

    answered = [each for episode in episodes for each in episode]
    return OneStep(
        steps=len(answered),
        episodes=sum(bool(episode) for episode in episodes),
        unreadable=sum(each.answer is None for each in answered),
        normalised=share(lambda each: each.words_are_right),
        token_f1=step_mean([[_token_f1(each) for each in episode] for episode in episodes], top=1),
        confusion=_confusion(answered),
        success_recalled=share(_called_success, among=lambda each: each.success),
        success_false=share(lambda each: not each.success, among=_called_success),
        reward_right=share(lambda each: each.reward_is_right),
        right_by_part=_right_by_part(episodes),
        reward_error=step_mean([[abs(e.answer.reward - e.step.reward) for e in episode if e.answer] for episode in episodes]),
        transition_error=share(lambda each: not (each.words_are_right and each.end_is_right)),
        invalid_recall=share(lambda each: each.called_invalid, among=lambda each: not each.step.valid),
        invalid_precision=share(lambda each: not each.step.valid, among=lambda each: each.called_invalid),
    )


def _right_by_part(episodes: Sequence[Sequence[Answered]]) -> dict[str, StepRate]:
    """The share of steps right in all, by the part that decided them."""
    shares = dict[str, StepRate]()
    for part in sorted({each.decided_by for episode in episodes for each in episode}):
        decided = [[each for each in episode if each.decided_by == part] for episode in episodes]
        right = [[e.words_are_right and e.end_is_right and e.reward_is_right for e in episode] for episode in decided]
        if (share := step_rate(right)) is not None:
            shares[part] = share
    return shares


def _called_success(each: Answered) -> bool:
    return each.dreamed_status == "success"


def _token_f1(each: Answered) -> float:
    return token_f1(each.answer.observation, each.step.next_observation) if each.answer else 0.0


def _confusion(answered: Sequence[Answered]) -> dict[str, dict[str, int]]:
    table = {real: dict.fromkeys((*STATUSES, "unreadable"), 0) for real in STATUSES}
    for each in answered:
        table[each.real_status][each.dreamed_status or "unreadable"] += 1
    return table


def drift(forced: Sequence[Answered], replays: Sequence[Replay]) -> Drift:
    """How whole episodes fare when their recorded actions are played again in the dream.

    Args: `forced`, each step behind the real history: how right it can be without drift; `replays`, of the same episodes.
    """
    free = [each for replay in replays for each in replay.answered]
    pairs = [(replay.real.success, replay.dreamed.success) for replay in replays]
    names = {True: "success", False: "no success"}
    numbers = sorted({each.number for each in [*forced, *free]})
    return Drift(
        episodes=len(replays),
        by_number=tuple(AtStep(number=n, forced=_right_at(forced, n), free=_right_at(free, n)) for n in numbers),
        outcomes={names[a]: {names[b]: pairs.count((a, b)) for b in (True, False)} for a in (True, False)},
        agreed=rate(real == dreamed for real, dreamed in pairs),
        success_recalled=rate(dreamed for real, dreamed in pairs if real),
        success_false=rate(not real for real, dreamed in pairs if dreamed),
        ended_early=rate(replay.dreamed.error is None and any(e.answer is None for e in replay.answered) for replay in replays),
        unreadable=sum(replay.dreamed.error is not None for replay in replays),
    )


def _right_at(answered: Sequence[Answered], number: int) -> Rate | None:
    return rate(each.words_are_right for each in answered if each.number == number)
