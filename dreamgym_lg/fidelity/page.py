"""The fidelity report written down: `fidelity.html` and `fidelity.json`.

As in `report`, the page stands alone (picture embedded, nothing fetched, no script, all text escaped), and what was not
measured is left out or said to be missing, never shown as a number.
"""

import json
from base64 import b64encode
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamgym_lg.errors import MissingDependency
from dreamgym_lg.experiment.report import DREAM, FAINT, INK, PAIR, REAL, STYLE, TICKS
from dreamgym_lg.fidelity.figures import Mean
from dreamgym_lg.fidelity.measure import Fidelity, Group
from dreamgym_lg.fidelity.steps import CLOSE, OneStep
from dreamgym_lg.fidelity.theorem import CAVEAT
from dreamgym_lg.statistics import Rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = tuple[str, Callable[[OneStep], Rate | Mean | None], str]
STEP_ROWS: tuple[Row, ...] = (
    ("observation, exact", lambda one: one.exact, ""),
    ("observation, words", lambda one: one.normalised, "case, whitespace and punctuation do not count"),
    ("observation, token F1", lambda one: one.token_f1, "mean over steps"),
    ("ends or goes on", lambda one: one.terminated, "agreement"),
    ("completes the task or not", lambda one: one.success, "agreement; easy where completion is rare"),
    ("completions recognised", lambda one: one.success_recalled, "of the steps that really completed the task"),
    ("false successes", lambda one: one.success_false, "of the dream's successes, those that really were none; 0 is best"),
    ("reward right", lambda one: one.reward_right, f"within {CLOSE}"),
    ("reward error", lambda one: one.reward_error, "mean |predicted − real|; 0 is best"),
    ("reward bias", lambda one: one.reward_bias, "mean predicted − real; above 0 the dream overpays"),
    ("invalid actions recognised", lambda one: one.invalid_recall, "recall, of those really invalid"),
    ("invalid actions rightly called", lambda one: one.invalid_precision, "precision, of those called invalid"),
)
WORTH = ("observation, words", "observation, token F1", "completions recognised", "reward right", "invalid actions recognised")
"""The rows of the ablation table; the others can be read in fidelity.json."""
_MARKS = "os^Dv<>"


def write_fidelity(fidelity: Fidelity, out: Path) -> tuple[Path, Path]:
    """Write `fidelity.html` and `fidelity.json` into the folder `out` and return their paths.

    Without matplotlib or jinja2: MissingDependency, and nothing is written.
    """
    for package in ("matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise MissingDependency.extra(package, "report")
    page = _page(fidelity)
    out.mkdir(parents=True, exist_ok=True)
    html, figures = out / "fidelity.html", out / "fidelity.json"
    figures.write_text(json.dumps(fidelity.to_dict(), indent=2))
    html.write_text(page, encoding="utf-8", errors="replace")  # a model may emit half a surrogate pair
    return html, figures


def _page(fidelity: Fidelity) -> str:
    from jinja2 import Environment, StrictUndefined

    jinja = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters.update(figure=_figure, samples=_samples)
    source = files("dreamgym_lg").joinpath("templates/fidelity.html.j2").read_text(encoding="utf-8")
    picture = _picture(fidelity)
    return jinja.from_string(source).render(
        fidelity=fidelity, steps=_table(fidelity), worth=_worth(fidelity), caveat=CAVEAT, version=version("dreamgym-lg"),
        picture=b64encode(picture).decode() if picture else "",
    )  # fmt: skip


def _figure(value: Rate | Mean | None) -> str:
    return "–" if value is None else str(value)


def _samples(value: Rate | Mean | None) -> str:
    if isinstance(value, Rate):
        return f"{value.successes:,}/{value.episodes:,}"
    return "none" if value is None else f"n={value.n:,}"


def _table(fidelity: Fidelity) -> list[tuple[str, str, list[Rate | Mean | None]]]:
    return [(name, meaning, [read(group.one_step) for group in fidelity.groups]) for name, read, meaning in STEP_ROWS]


def _worth(fidelity: Fidelity) -> list[dict[str, Any]]:
    """For each group and metric the model as it is, and each variant with what the missing input is worth."""
    rows = []
    for place, group in enumerate(fidelity.groups if len(fidelity.variants) > 1 else ()):
        measured: list[Group] = [variant.groups[place] for variant in fidelity.variants]
        metrics = [(name, [read(each.one_step) for each in measured]) for name, read, _ in STEP_ROWS if name in WORTH]
        metrics += [("replayed episodes: outcome agrees", [each.drift.agreed for each in measured])]
        for name, found in metrics:
            full = found[0]
            without = [(each, full.value - each.value if full and each else None) for each in found[1:]]
            rows.append({"group": group.name, "metric": name, "full": full, "without": without})
    return rows


def _picture(fidelity: Fidelity) -> bytes | None:
    """The PNG, with a panel for everything that was measured; None if nothing was. A plain `Figure`, not pyplot."""
    from matplotlib import style
    from matplotlib.figure import Figure

    panels: list[Callable[[Axes], None]] = []
    if fidelity.groups:
        panels += [lambda axes: _draw_drift(axes, fidelity), lambda axes: _draw_reliability(axes, fidelity)]
    if fidelity.comparisons:
        panels.append(lambda axes: _draw_policies(axes, fidelity))
    if len(fidelity.variants) > 1:
        panels.append(lambda axes: _draw_ablation(axes, fidelity))
    if not panels:
        return None
    rows = -(-len(panels) // 2)
    with style.context(["default", STYLE]):  # "default" first: a user's own style must not leak in
        figure, buffer = Figure(figsize=(16, 5.6 * rows), dpi=100, facecolor="white", layout="constrained"), BytesIO()
        grid = figure.subplots(rows, 2, squeeze=False).flatten()
        for axes, draw in zip(grid, panels, strict=False):
            draw(axes)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _errors(rates: list[Any]) -> list[list[float]]:
    """Arms of the intervals; a mean without one gets none."""
    arms = [(max(0.0, r.value - r.low), max(0.0, r.high - r.value)) if r.low is not None else (0.0, 0.0) for r in rates]
    return [[low for low, _ in arms], [high for _, high in arms]]


def _draw_drift(axes: "Axes", fidelity: Fidelity) -> None:
    axes.set(title="Observations right by step number", xlabel="step", ylim=(-0.03, 1.04), yticks=TICKS)
    axes.grid(axis="y")
    for group, color, shift in zip(fidelity.groups, (REAL, DREAM, *PAIR), (-0.09, 0.09, -0.03, 0.03), strict=False):
        for kind, look in (("forced", "o-"), ("free", "D--")):
            found = {at.number: each for at in group.drift.by_number if (each := getattr(at, kind))}
            places, rates = [number + shift for number in found], list(found.values())
            label = f"{group.name}: {'behind the real history' if kind == 'forced' else 'behind its own answers'}"
            axes.errorbar(places, [r.value for r in rates], _errors(rates), fmt=look, color=color, ms=6, lw=2, elinewidth=1,
                          mfc=color if kind == "forced" else "white", label=label)  # fmt: skip
    axes.locator_params(axis="x", integer=True)
    axes.legend(fontsize=11, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, columnspacing=1)


def _draw_reliability(axes: "Axes", fidelity: Fidelity) -> None:
    axes.set(title="Reward: said and real", xlabel="reward that the dream predicts", ylabel="mean real reward")
    axes.grid()
    bins = [(group.name, group.one_step.reliability) for group in fidelity.groups]
    for (name, rows), color, mark in zip(bins, (REAL, DREAM, *PAIR), _MARKS, strict=False):
        real = [row.real for row in rows]
        axes.errorbar([row.predicted for row in rows], [r.value for r in real], _errors(real), fmt=f"{mark}-", color=color,
                      ms=8, capsize=4, label=name)  # fmt: skip
        for row in rows:
            axes.annotate(f"n={row.real.n}", (row.predicted, row.real.value), (7, -14), textcoords="offset points", fontsize=11)
    ends = [value for _, rows in bins for row in rows for value in (row.predicted, row.real.value)]
    if ends:
        axes.plot([min(ends), max(ends)], [min(ends), max(ends)], ":", color=FAINT, label="perfect")
        axes.legend(fontsize=11.5)


def _draw_policies(axes: "Axes", fidelity: Fidelity) -> None:
    """Dream over real success: on the line the dream tells the truth, above it flatters."""
    axes.set(title="The same policy in both worlds", xlabel="real success", ylabel="dreamed success", aspect="equal",
             xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), xticks=TICKS, yticks=TICKS)  # fmt: skip
    axes.plot([0, 1], [0, 1], ":", color=FAINT)
    axes.text(0.03, 0.97, "the dream flatters", color=FAINT, fontsize=12, va="top")
    axes.text(0.97, 0.3, "the dream understates", color=FAINT, fontsize=12, ha="right")
    for row in fidelity.comparisons:
        axes.errorbar([row.real.value], [row.dream.value], _errors([row.dream]), _errors([row.real]), fmt="o", ms=8,
                      color=DREAM if row.apart else REAL, ecolor=INK, elinewidth=1, capsize=3)  # fmt: skip


def _draw_ablation(axes: "Axes", fidelity: Fidelity) -> None:
    axes.set(title="Observation words right, without each input", ylim=(0, 1.04), yticks=TICKS)
    axes.grid(axis="y")
    names = ["as it is", *(f"without\n{variant.without}" for variant in fidelity.variants[1:])]
    width = 0.8 / len(fidelity.groups)
    for place, (group, color) in enumerate(zip(fidelity.groups, (REAL, DREAM, *PAIR), strict=False)):
        rates = [variant.groups[place].one_step.normalised for variant in fidelity.variants]
        found = [(x + (place + 0.5) * width - 0.4, each) for x, each in enumerate(rates) if each]
        axes.bar([x for x, _ in found], [each.value for _, each in found], 0.9 * width, color=color, label=group.name)
        axes.errorbar([x for x, _ in found], [each.value for _, each in found], _errors([each for _, each in found]),
                      fmt="none", ecolor=INK, capsize=4)  # fmt: skip
    axes.set_xticks(range(len(names)), names)
    axes.legend(fontsize=11, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
