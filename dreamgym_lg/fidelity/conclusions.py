"""What a fidelity report says first: plain sentences, each with its figure, made only from what was measured."""

from collections.abc import Iterator

from dreamgym_lg.fidelity.judgement import Judgement
from dreamgym_lg.fidelity.policies import Comparison
from dreamgym_lg.fidelity.records import Conclusion, Fidelity, Group, Level
from dreamgym_lg.statistics import FEW_EPISODES, Rate, StepRate

_ORDER: tuple[Level, ...] = ("bad", "watch", "good")
UNGROUNDED = (
    "This dream is ungrounded: there is no real trajectory to measure it against. Nothing here says how far it can be "
    "trusted; record real episodes (`dreamgym import`) before a training run relies on it."
)
UNSHOWN = "No real transition is retrieved for the experience model: what it knows of this environment it brought with it."


def draw_conclusions(fidelity: Fidelity) -> tuple[Conclusion, ...]:
    """Sum up a measurement in sentences, the worst first."""
    return tuple(sorted(_conclusions(fidelity), key=lambda conclusion: _ORDER.index(conclusion.level)))


def _conclusions(fidelity: Fidelity) -> Iterator[Conclusion]:
    if not fidelity.grounded:
        yield Conclusion("bad", UNGROUNDED)
    if not fidelity.retrieves:
        yield Conclusion("watch", UNSHOWN)
    if fidelity.judgement is not None:
        yield from _of_judgement(fidelity.judgement)
    for group in fidelity.groups:
        yield from _of_group(group)
    yield from _of_comparisons(fidelity.comparisons)
    if (leaks := fidelity.leaks) and leaks.tasks_near and leaks.tasks_near.successes:
        exact = leaks.tasks_exact.successes if leaks.tasks_exact else 0
        near = f"{_of(leaks.tasks_near)} evaluation tasks are near-duplicates of a training task"
        words = f"(cosine {leaks.near:g} or more), {exact} the very same words"
        yield Conclusion("watch", f"{near} {words}: where they are no other tasks, scores on them are memory.")


def _level(rate: Rate | StepRate, *, good: float = 0.9, bad: float = 0.5) -> Level:
    """Few episodes are never called good, and bad only where their whole interval is."""
    if rate.high < bad or (rate.value < bad and rate.episodes >= FEW_EPISODES):
        return "bad"
    return "good" if rate.value >= good and rate.episodes >= FEW_EPISODES else "watch"


def _level_of_errors(rate: Rate | StepRate, *, bad: float = 0.1) -> Level:
    """The level of a rate that should be 0."""
    if rate.value >= bad:
        return "bad"
    return "watch" if rate.successes or rate.episodes < FEW_EPISODES else "good"


def _of_judgement(judgement: Judgement) -> Iterator[Conclusion]:
    if false := judgement.false_success:
        kinds = ", ".join(f"{kind} {_of(rate)}" for kind, rate in judgement.by_kind.items())
        sentence = f"The dream rewards {_of(false)} recorded and edited episodes that must not be rewarded ({kinds})."
        yield Conclusion(_level_of_errors(false, bad=0.05), sentence)
    if missed := judgement.false_failure:
        yield Conclusion(_level_of_errors(missed), f"The dream does not reward {_of(missed)} recorded successes.")
    if same := judgement.same_lookup:
        yield Conclusion(_level(same), f"Asked again before anything is written, {_of(same)} lookups are answered alike.")
    if after := judgement.lookup_after_write:
        yield Conclusion(_level(after), f"{_of(after)} lookups that a write really changed show in the dream what is new.")


def _of_group(group: Group) -> Iterator[Conclusion]:
    one, where = group.one_step, f"On {group.name}"
    if recalled := one.success_recalled:
        steps = f"{_of(recalled)} steps that really completed the task"
        never = "" if recalled.successes else "never says that the task is completed: it "
        yield Conclusion(_level(recalled), f"{where} the dream {never}recognised {steps}.")
    if false := one.success_false:
        sentence = f"{_of(false)} successes that the dream called, step by step, were none in reality."
        yield Conclusion(_level_of_errors(false), f"{where} {sentence}")
    if untrue := group.drift.success_false:
        sentence = f"{_of(untrue)} episodes that succeeded there had not succeeded in reality with the same actions."
        yield Conclusion(_level_of_errors(untrue), f"{where}, replayed in the dream, {sentence}")
    if recall := one.invalid_recall:
        yield Conclusion(_level(recall), f"{where} the dream recognised {_of(recall)} really invalid actions.")
    if group.rewarded and (right := one.reward_right):
        yield Conclusion(_level(right, bad=0.7), f"{where} {_of(right)} predicted rewards were right.")
    if words := one.normalised:
        yield Conclusion(_level(words, bad=0.3), f"{where} {_of(words)} next observations had the right words.")


def _of_comparisons(rows: tuple[Comparison, ...]) -> Iterator[Conclusion]:
    if not rows:
        return
    worst = max(rows, key=lambda row: abs(row.gap))
    widest = (
        f"widest gap {worst.gap:+.2f} ({worst.policy}, iteration {worst.iteration}: dreamed {_of(worst.dream, '/')}, "
        f"real {_of(worst.real, '/')})"
    )
    for word, sign in (("flatters", 1), ("understates", -1)):
        if count := sum(row.apart and row.gap * sign > 0 for row in rows):
            where = f"in {count} of {len(rows)} comparisons with reality on the same tasks"
            yield Conclusion("bad", f"The dream {word} the policy {where}; {widest}.")
    if not any(row.apart for row in rows):
        few = max(row.real.episodes for row in rows) < FEW_EPISODES
        sentence = f"Dreamed and real success of the same policy are nowhere provably apart ({len(rows)} comparisons)"
        yield Conclusion("watch" if few else "good", f"{sentence}; {widest}.")


def _of(rate: Rate | StepRate, of: str = " of ") -> str:
    return f"{rate.successes}{of}{rate.steps if isinstance(rate, StepRate) else rate.episodes}"
