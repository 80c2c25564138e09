"""Curves of a training run, from the metrics of its iterations."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dreamgym_lg.report.plots import DREAM, FAINT, INK, PAIR, REAL, TICKS, whiskers
from dreamgym_lg.statistics import Rate, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Mapping[int, Mapping[str, Any]]
"""A run's metrics by iteration, in order."""

UNIFORM, VALUE = ("uniform_groups", "Uniform groups", 1), ("curriculum_value", "Variance", 0.25)
INVALID, ENTROPY = ("invalid_action_share", "Invalid actions", 1), ("entropy", "Entropy (nats)", math.inf)
"""Metrics that are drawn in pairs: key, name and largest possible value."""


class Evaluation(NamedTuple):
    """Success of a policy in the real environment and in the dream, on the same worlds."""

    real: Rate | None
    dream: Rate | None

    @property
    def gap(self) -> str:
        """Dream minus real: how much the dream flatters."""
        return f"{self.dream.value - self.real.value:+.2f}" if self.real and self.dream else "–"


class Gap(NamedTuple):
    value: float
    low: float | None
    high: float | None


def by_iteration(metrics: Sequence[Mapping[str, Any]]) -> History:
    """Of two records of an iteration the later counts."""
    placed = {int(record["iteration"]): record for record in metrics if read_number(record.get("iteration")) is not None}
    return dict(sorted(placed.items()))


def read_number(value: Any, most: float = math.inf) -> float | None:
    """The value if it is a finite number in 0..most, as every figure here has to be, else None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) and 0 <= value <= most else None


def read_rate(record: Mapping[str, Any], prefix: str = "") -> Rate | None:
    """None unless an episode was played and the counts are possible; Wilson's interval where none is given."""
    episodes = int(read_number(record.get(f"{prefix}episodes")) or 0)
    successes = read_number(record.get(f"{prefix}successes"), episodes)
    if not episodes or successes is None:
        return None
    low, high = record.get(f"{prefix}interval") or wilson(int(successes), episodes)
    return Rate(int(successes), episodes, low, high, read_number(record.get(f"{prefix}invalid_action_share"), 1))


def read_series(history: History, key: str, most: float = math.inf) -> dict[int, float]:
    return {i: value for i, record in history.items() if (value := read_number(record.get(key), most)) is not None}


def read_evaluations(history: History) -> dict[int, Evaluation]:
    points = {i: Evaluation(read_rate(row, "eval_real_"), read_rate(row, "eval_dream_")) for i, row in history.items()}
    return {iteration: each for iteration, each in points.items() if each.real or each.dream}


def draw_rates(axes: "Axes", rates: Mapping[Any, Rate], **look: Any) -> None:
    look = {"ms": 9, "mew": 2.2, "elinewidth": 1.6, "capsize": 4, "capthick": 1.6, "clip_on": False, **look}
    axes.errorbar(list(rates), [rate.value for rate in rates.values()], whiskers(rates.values()), **look)


def draw_progress(axes: "Axes", history: History) -> None:
    axes.set(title="During training", xlabel="iteration", ylim=(0, 1.04), yticks=TICKS)
    axes.grid(axis="y")
    points = read_evaluations(history)
    if training := read_series(history, "train_success", 1):
        look: dict[str, Any] = {"color": FAINT, "alpha": 0.5, "label": "training rollouts"}
        axes.plot(list(training), list(training.values()), ".-", ms=4, lw=1.3, **look)
    for name, color, mark, fill in (("dream", DREAM, "D-", "white"), ("real", REAL, "o-", REAL)):
        rates = {iteration: rate for iteration, row in points.items() if (rate := getattr(row, name))}
        if rates:
            lows, highs = zip(*(rate[2:4] for rate in rates.values()), strict=True)
            axes.fill_between(list(rates), lows, highs, color=color, alpha=0.12, linewidth=0)
            draw_rates(axes, rates, fmt=mark, color=color, mfc=fill, linewidth=2.5, label=name)
    if training or points:
        axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.99), ncols=3, handlelength=1.3, columnspacing=1)


def draw_pair(axes: "Axes", history: History, metrics: Sequence[tuple[str, str, float]]) -> None:
    """Two metrics, each on its own scale from 0, named and numbered in its own colour."""
    axes.set(title=", ".join(name for _, name, _ in metrics), xlabel="iteration")
    axes.grid(axis="y")
    recorded = [(name, most, series) for key, name, most in metrics if (series := read_series(history, key, most))]
    for place, (name, most, series) in enumerate(recorded):
        side, color = axes.twinx() if place else axes, PAIR[place]
        side.plot(list(series), list(series.values()), ".-", ms=4, color=color, linewidth=2)
        side.set_ylim(0, most if math.isfinite(most) else 1.1 * max(series.values()) or 1)
        side.set_title(name, loc="right" if place else "left", color=color)
        side.tick_params(axis="y", colors=color)


def draw_gap(axes: "Axes", history: History) -> None:
    """Dreamed minus real success of the evaluations, with its interval: above 0 the dream flatters."""
    axes.set(title="Gap: dream minus real", xlabel="iteration")
    axes.grid(axis="y")
    gaps = {
        iteration: Gap(row["eval_gap"], row.get("eval_gap_low"), row.get("eval_gap_high"))
        for iteration, row in history.items()
        if row.get("eval_gap") is not None
    }
    if gaps:
        values = [gap.value for gap in gaps.values()]
        axes.errorbar(list(gaps), values, whiskers(gaps.values()), fmt="s-", color=INK, ms=7, lw=2, capsize=4)
        axes.axhline(0, color=FAINT, lw=1)


PROGRESS: tuple[Callable[..., None], ...] = (draw_progress, draw_gap)
HEALTH: tuple[Callable[..., None], ...] = (
    partial(draw_pair, metrics=(UNIFORM, VALUE)),
    partial(draw_pair, metrics=(INVALID, ENTROPY)),
)


def draw_panels(
    figure: "Figure", history: History, panels: Sequence[Callable[["Axes"], None]], alarms: Collection[int] = (), **edges: Any
) -> None:
    """Draw four panels, each by a function of its axes.

    Args: `alarms`, iterations that the curves mark; `edges`, of the grid: matplotlib's own layout would take as long again
    as all the drawing.
    """
    axes: list[Any] = [*figure.subplots(2, 2, gridspec_kw={"left": 0.045, "right": 0.955, "wspace": 0.22, **edges}).flat]
    for place, draw in zip(axes, panels, strict=True):
        draw(place)
        if history and place.get_xlabel() == "iteration":
            place.set_xlim(min(history) - 1, max(history) + 1)
            place.locator_params(axis="x", integer=True)
            for iteration in alarms if place.has_data() else ():
                place.axvline(iteration, color=DREAM, lw=1.5, ls=":")
    for place in figure.axes:
        if not place.has_data():
            place.set_axis_off()
            place.text(0.5, 0.5, "not recorded", transform=place.transAxes, ha="center", va="center", color=FAINT)


def draw_curves(figure: "Figure", history: History, alarms: Collection[int]) -> None:
    """Success, gap, curriculum and health of a run; `alarms`, the iterations at which something began to go wrong."""
    panels = [partial(draw, history=history) for draw in (*PROGRESS, *HEALTH)]
    draw_panels(figure, history, panels, alarms, top=0.94, bottom=0.08, hspace=0.36)
