"""The report of a dream: its figures, conclusions drawn only from them, `fidelity.html` and `fidelity.json`.

A figure that was not measured is left out or said to be missing, never shown as a number.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from dreamgym_lg.dream.dream import Dream
from dreamgym_lg.dream.model import Model
from dreamgym_lg.event_loop import run_lasting
from dreamgym_lg.fidelity.judgement import LOOKUP, MISSED, WRITTEN, Judgement
from dreamgym_lg.fidelity.steps import MAX_REWARD_ERROR, OneStep, measure_steps
from dreamgym_lg.hosted import name_of
from dreamgym_lg.progress import OnProgress, counter
from dreamgym_lg.report.pages import check_installed, create_templates
from dreamgym_lg.statistics import FEW_EPISODES, Rate, StepRate
from dreamgym_lg.types import Trajectory

Level = Literal["bad", "watch", "good"]
_ORDER: tuple[Level, ...] = ("bad", "watch", "good")
UNGROUNDED = (
    "This dream is ungrounded: there is no real trajectory to measure it against. Nothing here says how far it can be "
    "trusted; record real episodes (`dreamgym import`) before a training run relies on it."
)
UNRETRIEVED = "No real transition is retrieved for the experience model: what it knows of this environment it brought with it."
_SENTENCES = {
    MISSED: "The dream does not reward {} recorded successes.",
    LOOKUP: "Repeated before anything is written, {} lookups are answered differently.",
    WRITTEN: "{} lookups that a write really changed do not show in the dream what is new.",
}
"""Of the dream's errors, by kind."""
GROUPS = {"offline": "offline data", "real": "the policy's own actions"}
STEP_FIGURES = (
    ("normalised", "observation, words", "case, whitespace and punctuation do not count"),
    ("success_recalled", "completions recognised", "of the steps that really completed the task"),
    ("success_false", "false successes", "of the dream's successes, those that really were none; 0 is best"),
    ("reward_right", "reward right", f"within {MAX_REWARD_ERROR}"),
    ("invalid_recall", "invalid actions recognised", "of those really invalid"),
)
"""Field of `OneStep`, its name in the report, and its meaning."""


class Conclusion(NamedTuple):
    """One sentence of a fidelity report, with how good or bad its news are."""

    level: Level
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One kind of real trajectories, as the dream answers them."""

    name: str
    episodes: int
    of: int
    """Episodes of this kind there were; `episodes` of them were drawn."""
    rewarded: bool
    """True if any of these steps really had a reward other than 0. If none had, always predicting 0 is right without merit."""
    one_step: OneStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """How far a dream can be trusted. A figure that was not measured is None or empty."""

    experience_model: str
    version: str
    retrieved: int
    """Demonstrations in every prompt."""
    retrieves: bool
    """True if there is a real transition of a train task to retrieve."""
    left_out: int
    """Real trajectories that failed to be played or have no step."""
    groups: tuple[Group, ...]
    """One for each kind of real trajectories; empty without one."""
    judgement: Judgement | None
    """The dream's verdicts on recorded episodes."""
    notes: tuple[str, ...]

    @property
    def grounded(self) -> bool:
        """True if there was a real trajectory to measure against."""
        return bool(self.groups) or (self.judgement is not None and bool(self.judgement.errors))

    @property
    def conclusions(self) -> tuple[Conclusion, ...]:
        """Sentences to read first, the worst first."""
        return tuple(sorted(_conclusions(self), key=lambda conclusion: _ORDER.index(conclusion.level)))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-serialisable values. A rate is successes, n, value, low and high (and of how many episodes, where
        n are steps); None for a figure that was not measured."""
        return {"grounded": self.grounded, **_as_json(self), "conclusions": _as_json(self.conclusions)}


def measure(
    dream: Dream,
    trajectories: Iterable[Trajectory],
    *,
    limit: int | None = 100,
    seed: int = 0,
    judgement: Judgement | None = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = lambda *_: None,
) -> Fidelity:
    """Measure how far a dream can be trusted, on held-out trajectories.

    Trajectories of source `offline` and `real` are put to it step by step, the traces of their own task left out. The same
    input gives the same result.

    Args:
        dream: The very object in which a policy is trained.
        limit: Episodes drawn of each source, at most; None for all.
        judgement: The same dream's verdicts (`ajudge`), for the report.
        notes: Printed in the report, such as where the trajectories come from.
        on_progress: Called with a label, the number done and the total.

    Raises whatever the model's server raises. An answer that cannot be read is a wrong answer, no error.
    """
    model = next((part for part in dream.responders if isinstance(part, Model)), Model(None))
    trajectories, groups = list(trajectories), list[Group]()
    real = [each for each in trajectories if each.source != "synthetic"]
    playable = [each for each in real if each.error is None and each.steps]
    for source in dict.fromkeys(each.source for each in playable):
        name, members = GROUPS[source], [each for each in playable if each.source == source]
        drawn = sorted(Random(f"{seed}/{name}").sample(range(len(members)), min(limit or len(members), len(members))))
        model.retrieve(episodes := [members[index] for index in drawn])
        figures = run_lasting(measure_steps(dream, episodes, on_episode=counter(on_progress, name, len(episodes))))
        rewarded = any(step.reward for each in episodes for step in each.steps)
        groups.append(Group(name=name, episodes=len(episodes), of=len(members), rewarded=rewarded, one_step=figures))
    return Fidelity(
        experience_model=name_of(model.model) if model.model is not None else "none",
        version=dream.version,
        retrieved=model.k,
        retrieves=model.retrieves,
        left_out=len(real) - len(playable),
        groups=tuple(groups),
        judgement=judgement,
        notes=tuple(notes),
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, Rate | StepRate):
        of = {"n": value.steps, "episodes": value.episodes} if isinstance(value, StepRate) else {"n": value.episodes}
        return {"successes": value.successes, **of, "value": value.value, "low": value.low, "high": value.high}
    if isinstance(value, Conclusion):
        return value._asdict()
    if is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value


# --- conclusions ---------------------------------------------------------------------------------------------------------


def _conclusions(fidelity: Fidelity) -> Iterator[Conclusion]:
    if not fidelity.grounded:
        yield Conclusion("bad", UNGROUNDED)
    if not fidelity.retrieves and (fidelity.groups or not fidelity.grounded):  # else no model is asked
        yield Conclusion("watch", UNRETRIEVED)
    if fidelity.judgement is not None:
        yield from _of_judgement(fidelity.judgement)
    for group in fidelity.groups:
        yield from _of_group(group)


def _level(rate: Rate | StepRate, *, bad: float = 0.5) -> Level:
    """Few episodes are never called good, and bad only where their whole interval is."""
    if rate.high < bad or (rate.value < bad and rate.episodes >= FEW_EPISODES):
        return "bad"
    return "good" if rate.value >= 0.9 and rate.episodes >= FEW_EPISODES else "watch"


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
    for kind, sentence in _SENTENCES.items():
        if rate := judgement.errors.get(kind):
            yield Conclusion(_level_of_errors(rate), sentence.format(_of(rate)))


def _of_group(group: Group) -> Iterator[Conclusion]:
    one, where = group.one_step, f"On {group.name}"
    if recalled := one.success_recalled:
        steps = f"{_of(recalled)} steps that really completed the task"
        never = "" if recalled.successes else "never says that the task is completed: it "
        yield Conclusion(_level(recalled), f"{where} the dream {never}recognised {steps}.")
    if false := one.success_false:
        sentence = f"{_of(false)} successes that the dream called, step by step, were none in reality."
        yield Conclusion(_level_of_errors(false), f"{where} {sentence}")
    if recall := one.invalid_recall:
        yield Conclusion(_level(recall), f"{where} the dream recognised {_of(recall)} really invalid actions.")
    if group.rewarded and (right := one.reward_right):
        yield Conclusion(_level(right, bad=0.7), f"{where} {_of(right)} predicted rewards were right.")
    if words := one.normalised:
        yield Conclusion(_level(words, bad=0.3), f"{where} {_of(words)} next observations had the right words.")


def _of(rate: Rate | StepRate) -> str:
    return f"{rate.successes} of {rate.steps if isinstance(rate, StepRate) else rate.episodes}"


# --- files ---------------------------------------------------------------------------------------------------------------


def write_fidelity(fidelity: Fidelity, out: Path) -> tuple[Path, Path]:
    """Write `fidelity.html` and `fidelity.json` into the folder `out` and return their paths.

    Raises `MissingDependency` without jinja2, and nothing is written.
    """
    check_installed("jinja2", extra="report")
    templates = create_templates(figure=lambda value: "–" if value is None else str(value), samples=_samples)
    page = templates.get_template("fidelity.html.j2").render(
        fidelity=fidelity, steps=_table(fidelity), few=FEW_EPISODES, version=version("dreamgym-lg")
    )
    out.mkdir(parents=True, exist_ok=True)
    html, figures = out / "fidelity.html", out / "fidelity.json"
    figures.write_text(json.dumps(fidelity.to_dict(), indent=2))
    html.write_text(page, encoding="utf-8", errors="replace")  # a model may emit half a surrogate pair
    return html, figures


def _samples(value: Rate | StepRate | None) -> str:
    """Samples of a figure, such as "45/60 steps of 12 episodes". Of a rate over episodes the counts alone."""
    if value is None:
        return "none"
    if isinstance(value, Rate):
        return f"{value.successes:,}/{value.episodes:,}"
    steps, episodes = ("" if number == 1 else "s" for number in (value.steps, value.episodes))
    return f"{value.successes:,}/{value.steps:,} step{steps} of {value.episodes:,} episode{episodes}"


def _table(fidelity: Fidelity) -> list[tuple[str, str, list[StepRate | None]]]:
    ones = [group.one_step for group in fidelity.groups]
    rows = [(name, meaning, [getattr(one, field) for one in ones]) for field, name, meaning in STEP_FIGURES]
    parts = sorted({part for one in ones for part in one.right_by_part})
    if len(parts) > 1:
        meaning = "words, end and reward"
        rows += [(f"right, decided by {part}", meaning, [one.right_by_part.get(part) for one in ones]) for part in parts]
    return rows
