"""How often the dream's answers to real steps are right: one step at a time (teacher-forced), and over whole replays."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dreamgym_lg.fidelity.replay import CLOSE, Answered, Replay
from dreamgym_lg.statistics import Mean, Rate, StepRate, mean, normalised, rate, step_mean, step_rate, token_f1

STATUSES = ("continues", "failure", "success")
BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """One row of the reliability table: steps to which the dream gave about the same reward."""

    low: float
    high: float
    predicted: float
    real: Mean


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStep:
    """Teacher-forced: each real step predicted behind the real history. An unreadable answer is a wrong one."""

    steps: int
    episodes: int
    """How many episodes the steps are from."""
    unreadable: int
    exact: StepRate | None
    """The same observation, but for whitespace around it."""
    normalised: StepRate | None
    """The same words: case, whitespace and punctuation do not count."""
    token_f1: Mean | None
    terminated: StepRate | None
    """Agreement whether the episode ends here."""
    success: StepRate | None
    """Agreement whether the task is completed here."""
    confusion: dict[str, dict[str, int]]
    """Real status -> dreamed status (or `unreadable`) -> number of steps."""
    success_recalled: StepRate | None
    """Of the steps that really completed the task, those that the dream, too, calls a success."""
    success_false: StepRate | None
    """Of the steps that the dream calls a success, those that really were none: how a dream lies."""
    reward_right: StepRate | None
    """Rewards within CLOSE of the real one."""
    right_by_part: dict[str, StepRate]
    """Steps right in words, end and reward, by the responder or judge that decided them."""
    reward_error: Mean | None
    """Mean |predicted - real| over readable answers: eps_R of the paper's Theorem 1, as a mean."""
    reward_bias: Mean | None
    """Mean predicted - real: above 0 the dream overpays."""
    transition_error: StepRate | None
    """Steps whose next observation (normalised) or end is another one: eps_P of the paper's Theorem 1, as a mean. An unreadable
    answer counts as another one."""
    invalid_recall: StepRate | None
    invalid_precision: StepRate | None
    reliability: tuple[Bin, ...]
    calibration_error: float | None
    """Mean |predicted - real mean| over the rows of `reliability`, weighted by their steps."""
    success_if_said: StepRate | None
    """Real success where the dream says success."""
    success_if_not_said: StepRate | None
    """Real success where the dream says anything else."""


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
    return_error: Mean | None
    return_bias: Mean | None
    ended_early: Rate | None
    """Episodes that the dream ended, rightly or not, before their recorded actions were played."""
    unreadable: int


def one_step(episodes: Sequence[Sequence[Answered]]) -> OneStep:
    """The figures of all steps, given episode by episode: intervals allow for the steps of one episode being alike."""
    answered = [each for episode in episodes for each in episode]
    errors = [[error for each in episode if (error := _reward_error(each)) is not None] for episode in episodes]
    bins = reliability([[(each.answer.reward, each.step.reward) for each in episode if each.answer] for episode in episodes])
    return OneStep(
        steps=len(answered),
        episodes=sum(bool(episode) for episode in episodes),
        unreadable=sum(each.answer is None for each in answered),
        exact=_share(episodes, _is_exact),
        normalised=_share(episodes, is_right),
        token_f1=step_mean([[_token_f1(each) for each in episode] for episode in episodes], top=1),
        terminated=_share(episodes, _end_agrees),
        success=_share(episodes, lambda each: each.answer is not None and each.answer.info["success"] == each.success),
        confusion=_confusion(answered),
        success_recalled=_share(episodes, _called_success, among=lambda each: each.success),
        success_false=_share(episodes, lambda each: not each.success, among=_called_success),
        reward_right=_share(episodes, _reward_is_right),
        right_by_part=_right_by_part(episodes),
        reward_error=step_mean([[abs(error) for error in each] for each in errors]),
        reward_bias=step_mean(errors),
        transition_error=_share(episodes, lambda each: not (is_right(each) and _end_agrees(each))),
        invalid_recall=_share(episodes, lambda each: each.called_invalid, among=lambda each: not each.step.valid),
        invalid_precision=_share(episodes, lambda each: not each.step.valid, among=lambda each: each.called_invalid),
        reliability=bins,
        calibration_error=_calibration_error(bins),
        success_if_said=_share(episodes, lambda each: each.success, among=_called_success),
        success_if_not_said=_share(episodes, lambda each: each.success, among=lambda each: not _called_success(each)),
    )


def _share(
    episodes: Sequence[Sequence[Answered]],
    right: Callable[[Answered], bool],
    among: Callable[[Answered], bool] = lambda each: True,
) -> StepRate | None:
    return step_rate([[right(each) for each in episode if among(each)] for episode in episodes])


def _right_by_part(episodes: Sequence[Sequence[Answered]]) -> dict[str, StepRate]:
    parts = sorted({each.decided_by for episode in episodes for each in episode})
    shares = {
        part: _share([[each for each in episode if each.decided_by == part] for episode in episodes], _is_all_right)
        for part in parts
    }
    return {part: share for part, share in shares.items() if share is not None}


def _is_all_right(each: Answered) -> bool:
    return is_right(each) and _end_agrees(each) and _reward_is_right(each)


def is_right(each: Answered) -> bool:
    """Whether the dream's next observation has the real one's words: case, whitespace and punctuation do not count."""
    return each.answer is not None and normalised(each.answer.observation) == normalised(each.step.next_observation)


def _is_exact(each: Answered) -> bool:
    return each.answer is not None and each.answer.observation.strip() == each.step.next_observation.strip()


def _end_agrees(each: Answered) -> bool:
    return each.answer is not None and each.answer.terminated == each.step.terminated


def _called_success(each: Answered) -> bool:
    return each.dreamed_status == "success"


def _reward_error(each: Answered) -> float | None:
    return None if each.answer is None else each.answer.reward - each.step.reward


def _reward_is_right(each: Answered) -> bool:
    error = _reward_error(each)
    return error is not None and abs(error) <= CLOSE


def _token_f1(each: Answered) -> float:
    return token_f1(each.answer.observation, each.step.next_observation) if each.answer else 0.0


def reliability(episodes: Sequence[Sequence[tuple[float, float]]]) -> tuple[Bin, ...]:
    """A reliability table of (predicted, real) rewards, given episode by episode, from the lowest predicted reward up.

    It has a row for each predicted value or, of more than BINS values, for each tenth of the steps.
    """
    ranked = sorted((predicted, real, number) for number, pairs in enumerate(episodes) for predicted, real in pairs)
    values = sorted({round(predicted, 2) for predicted, _, _ in ranked})
    if len(values) <= BINS:
        groups = [[each for each in ranked if round(each[0], 2) == value] for value in values]
    else:
        edges = [len(ranked) * part // BINS for part in range(BINS + 1)]
        groups = [ranked[start:end] for start, end in zip(edges, edges[1:], strict=False) if end > start]
    return tuple(_bin(group) for group in groups)


def _bin(group: Sequence[tuple[float, float, int]]) -> Bin:
    predicted, by_episode = [each[0] for each in group], defaultdict[int, list[float]](list)
    for _, reward, number in group:
        by_episode[number].append(reward)
    real = step_mean(by_episode.values())
    assert real is not None  # a group has at least one step
    return Bin(low=predicted[0], high=predicted[-1], predicted=sum(predicted) / len(predicted), real=real)


def _calibration_error(bins: Sequence[Bin]) -> float | None:
    steps = sum(each.real.n for each in bins)
    return sum(abs(each.predicted - each.real.value) * each.real.n for each in bins) / steps if steps else None


def _confusion(answered: Sequence[Answered]) -> dict[str, dict[str, int]]:
    table = {real: dict.fromkeys((*STATUSES, "unreadable"), 0) for real in STATUSES}
    for each in answered:
        table[each.real_status][each.dreamed_status or "unreadable"] += 1
    return table


def drift(forced: Sequence[Answered], replays: Sequence[Replay]) -> Drift:
    """How whole episodes fare when their recorded actions are played again in the dream.

    Args:
        forced: Every step answered after the real history, as the measure of how right it can be without drift.
        replays: The same episodes, each step answered after the dream's own answers.
    """
    free = [each for replay in replays for each in replay.answered]
    pairs = [(replay.real.success, replay.dreamed.success) for replay in replays]
    names = {True: "success", False: "no success"}
    outcomes = {names[a]: {names[b]: pairs.count((a, b)) for b in (True, False)} for a in (True, False)}
    off = [replay.dreamed.reward - _reached(replay) for replay in replays if replay.dreamed.error is None]
    return Drift(
        episodes=len(replays),
        by_number=tuple(
            AtStep(number=number, forced=_right_at(forced, number), free=_right_at(free, number))
            for number in sorted({each.number for each in [*forced, *free]})
        ),
        outcomes=outcomes,
        agreed=rate(real == dreamed for real, dreamed in pairs),
        success_recalled=rate(dreamed for real, dreamed in pairs if real),
        success_false=rate(not real for real, dreamed in pairs if dreamed),
        return_error=mean([abs(each) for each in off]),
        return_bias=mean(off),
        ended_early=rate(replay.dreamed.error is None and any(e.answer is None for e in replay.answered) for replay in replays),
        unreadable=sum(replay.dreamed.error is not None for replay in replays),
    )


def _right_at(answered: Sequence[Answered], number: int) -> Rate | None:
    return rate(is_right(each) for each in answered if each.number == number)


def _reached(replay: Replay) -> float:
    """What the same steps really earned: those that no check refused."""
    return float(sum(each.step.reward for each in replay.answered))
