"""The fidelity report written down: `fidelity.html` and `fidelity.json`.

The page stands alone (picture embedded, nothing fetched, no script, all text escaped), and what was not
measured is left out or said to be missing, never shown as a number.
"""

import json
from base64 import b64encode
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamgym_lg.fidelity.records import Fidelity
from dreamgym_lg.fidelity.replay import CLOSE
from dreamgym_lg.fidelity.steps import OneStep
from dreamgym_lg.report.pages import check_installed, create_templates
from dreamgym_lg.report.plots import DREAM, FAINT, INK, PAIR, REAL, TICKS, draw_png, whiskers
from dreamgym_lg.statistics import FEW_EPISODES, Figure, Mean, Rate, StepRate

if TYPE_CHECKING:
    from matplotlib import figure
    from matplotlib.axes import Axes

STEP_FIGURES: tuple[tuple[str, Callable[[OneStep], StepRate | Mean | None], str], ...] = (
    ("observation, words", lambda one: one.normalised, "case, whitespace and punctuation do not count"),
    ("observation, token F1", lambda one: one.token_f1, "mean over steps"),
    ("completions recognised", lambda one: one.success_recalled, "of the steps that really completed the task"),
    ("false successes", lambda one: one.success_false, "of the dream's successes, those that really were none; 0 is best"),
    ("reward right", lambda one: one.reward_right, f"within {CLOSE}"),
    ("reward error", lambda one: one.reward_error, "mean |predicted − real|; 0 is best"),
    ("transition error", lambda one: one.transition_error, "observation (words) or end is another one; 0 is best"),
    ("invalid actions recognised", lambda one: one.invalid_recall, "recall, of those really invalid"),
    ("invalid actions rightly called", lambda one: one.invalid_precision, "precision, of those called invalid"),
)


def write_fidelity(fidelity: Fidelity, out: Path) -> tuple[Path, Path]:
    """Write `fidelity.html` and `fidelity.json` into the folder `out` and return their paths.

    Without matplotlib or jinja2: MissingDependency, and nothing is written.
    """
    check_installed("matplotlib", "jinja2", extra="report")
    page = _page(fidelity)
    out.mkdir(parents=True, exist_ok=True)
    html, figures = out / "fidelity.html", out / "fidelity.json"
    figures.write_text(json.dumps(fidelity.to_dict(), indent=2))
    html.write_text(page, encoding="utf-8", errors="replace")  # a model may emit half a surrogate pair
    return html, figures


def _page(fidelity: Fidelity) -> str:
    templates = create_templates(figure=_figure, samples=_samples)
    picture = _picture(fidelity)
    return templates.get_template("fidelity.html.j2").render(
        fidelity=fidelity,
        steps=_table(fidelity),
        few=FEW_EPISODES,
        version=version("dreamgym-lg"),
        picture=b64encode(picture).decode() if picture else "",
    )


def _figure(value: Figure | None) -> str:
    return "–" if value is None else str(value)


def _samples(value: Figure | None) -> str:
    """What a figure is of, such as "45/60 steps of 12 episodes"; of a rate over episodes or tasks the counts alone."""
    if value is None:
        return "none"
    if isinstance(value, Rate):
        return f"{value.successes:,}/{value.episodes:,}"
    if isinstance(value, StepRate):
        return f"{value.successes:,}/{_steps(value.steps, value.episodes)}"
    return _steps(value.n, value.episodes)


def _steps(steps: int, episodes: int) -> str:
    if steps == episodes:  # one value an episode
        return f"{episodes:,} episode{'' if episodes == 1 else 's'}"
    return f"{steps:,} step{'' if steps == 1 else 's'} of {episodes:,} episode{'' if episodes == 1 else 's'}"


def _table(fidelity: Fidelity) -> list[tuple[str, str, list[StepRate | Mean | None]]]:
    ones = [group.one_step for group in fidelity.groups]
    rows: list[tuple[str, str, list[StepRate | Mean | None]]] = [
        (name, meaning, [read(one) for one in ones]) for name, read, meaning in STEP_FIGURES
    ]
    parts = sorted({part for one in ones for part in one.right_by_part})
    if len(parts) > 1:
        meaning = "words, end and reward"
        rows += [(f"right, decided by {part}", meaning, [one.right_by_part.get(part) for one in ones]) for part in parts]
    return rows


def _picture(fidelity: Fidelity) -> bytes | None:
    """The PNG, with a panel for everything that was measured; None if nothing was."""
    panels = [panel for panel, measured in ((_draw_drift, fidelity.groups), (_draw_policies, fidelity.comparisons)) if measured]

    def draw(whole: "figure.Figure") -> None:
        for axes, panel in zip(whole.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel(axes, fidelity)

    return draw_png(draw, width=8 * len(panels), height=5.6, layout="constrained") if panels else None


def _draw_drift(axes: "Axes", fidelity: Fidelity) -> None:
    axes.set(title="Observations right by step number", xlabel="step", ylim=(-0.03, 1.04), yticks=TICKS)
    axes.grid(axis="y")
    for group, color, shift in zip(fidelity.groups, (REAL, DREAM, *PAIR), (-0.09, 0.09, -0.03, 0.03), strict=False):
        for kind, look in (("forced", "o-"), ("free", "D--")):
            rates_at = {at.number: each for at in group.drift.by_number if (each := getattr(at, kind))}
            places, rates = [number + shift for number in rates_at], list(rates_at.values())
            label = f"{group.name}: {'behind the real history' if kind == 'forced' else 'behind its own answers'}"
            arms, fill = whiskers(rates), color if kind == "forced" else "white"
            look_of: dict[str, Any] = {"color": color, "ms": 6, "lw": 2, "elinewidth": 1, "mfc": fill, "label": label}
            axes.errorbar(places, [r.value for r in rates], arms, fmt=look, **look_of)
    axes.locator_params(axis="x", integer=True)
    axes.legend(fontsize=11, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, columnspacing=1)


def _draw_policies(axes: "Axes", fidelity: Fidelity) -> None:
    """Dream over real success: on the line the dream tells the truth, above it flatters."""
    axes.set(title="The same policy in dream and reality", xlabel="real success", ylabel="dreamed success")
    axes.set(aspect="equal", xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), xticks=TICKS, yticks=TICKS)
    axes.plot([0, 1], [0, 1], ":", color=FAINT)
    axes.text(0.03, 0.97, "the dream flatters", color=FAINT, fontsize=12, va="top")
    axes.text(0.97, 0.3, "the dream understates", color=FAINT, fontsize=12, ha="right")
    for row in fidelity.comparisons:
        look: dict[str, Any] = {"fmt": "o", "ms": 8, "ecolor": INK, "elinewidth": 1, "capsize": 3}
        arms, color = (whiskers([row.dream]), whiskers([row.real])), DREAM if row.apart else REAL
        axes.errorbar([row.real.value], [row.dream.value], *arms, color=color, **look)
