"""The fidelity report written down: `fidelity.html`, which stands alone, and `fidelity.json`.

A figure that was not measured is left out or said to be missing, never shown as a number.
"""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from dreamgym_lg.fidelity.records import Fidelity
from dreamgym_lg.fidelity.replay import CLOSE
from dreamgym_lg.fidelity.steps import OneStep
from dreamgym_lg.report.pages import check_installed, create_templates
from dreamgym_lg.statistics import FEW_EPISODES, Figure, Mean, Rate, StepRate

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

    Raises `MissingDependency` without jinja2 (`check_pages`), and nothing is written.
    """
    check_pages()
    templates = create_templates(figure=_figure, samples=_samples)
    page = templates.get_template("fidelity.html.j2").render(
        fidelity=fidelity, steps=_table(fidelity), few=FEW_EPISODES, version=version("dreamgym-lg")
    )
    out.mkdir(parents=True, exist_ok=True)
    html, figures = out / "fidelity.html", out / "fidelity.json"
    figures.write_text(json.dumps(fidelity.to_dict(), indent=2))
    html.write_text(page, encoding="utf-8", errors="replace")  # a model may emit half a surrogate pair
    return html, figures


def check_pages() -> None:
    """Raise `MissingDependency` where no page can be written: before anything is measured, which may cost calls."""
    check_installed("jinja2", extra="report")


def _figure(value: Figure | None) -> str:
    return "–" if value is None else str(value)


def _samples(value: Figure | None) -> str:
    """Samples of a figure, such as "45/60 steps of 12 episodes". Of a rate over episodes the counts alone."""
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
