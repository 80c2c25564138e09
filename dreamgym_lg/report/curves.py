"""Curves of a training run, and the style of all pictures. Drawing needs matplotlib."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from dreamgym_lg.statistics import Rate, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which suit any colour vision. Real and dream have the same ones everywhere.
REAL, DREAM, PAIR, INK, FAINT = "#0072B2", "#D55E00", ("#008060", "#8C4A86"), "#222222", "#666666"
STYLE: Mapping[str, object] = {
    "font.size": 15,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": "#999999",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 17,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "legend.fontsize": 14,
}
TICKS = [0, 0.25, 0.5, 0.75, 1]
"""Ticks of an axis from 0 to 1."""


History = Mapping[int, Mapping[str, Any]]
"""A run's metrics by iteration, in order."""

UNIFORM, VALUE = ("uniform_groups", "Uniform groups", 1), ("curriculum_value", "Variance", 0.25)
INVALID, ENTROPY = ("invalid_action_share", "Invalid actions", 1), ("entropy", "Entropy (nats)", math.inf)
"""Metrics that are drawn in pairs: (key, name, largest possible value)."""


class Evaluation(NamedTuple):
    """Success of a policy in reality and in the dream."""

    real: Rate | None
    dream: Rate | None
    recorded: float | None = None
    """Dreamed minus real success on the tasks that both played, where it is recorded."""

    @property
    def gap(self) -> str:
        """Dreamed minus real success on the same tasks, as text. A dash where not all were played in both places."""
        gap = self.recorded
        if gap is None and self.real and self.dream and self.real.episodes == self.dream.episodes:
            gap = self.dream.value - self.real.value
        return "–" if gap is None else f"{gap:+.2f}"


def by_iteration(metrics: Sequence[Mapping[str, Any]]) -> History:
    """Metrics by iteration, in order. Of two records of an iteration the later counts."""
    history = {int(record["iteration"]): record for record in metrics if read_number(record.get("iteration")) is not None}
    return dict(sorted(history.items()))


def read_number(value: Any, most: float = math.inf, least: float = 0) -> float | None:
    """The value if it is a finite number in least..most, else None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) and least <= value <= most else None


def read_rate(record: Mapping[str, Any], prefix: str = "") -> Rate | None:
    """The rate in a record, with Wilson's interval if it has none. None for missing or impossible counts."""
    episodes = int(read_number(record.get(f"{prefix}episodes")) or 0)
    successes = read_number(record.get(f"{prefix}successes"), episodes)
    if not episodes or successes is None:
        return None
    low, high = record.get(f"{prefix}interval") or wilson(int(successes), episodes)
    return Rate(int(successes), episodes, low, high, read_number(record.get(f"{prefix}invalid_action_share"), 1))


def read_series(history: History, key: str, most: float = math.inf) -> dict[int, float]:
    return {i: value for i, record in history.items() if (value := read_number(record.get(key), most)) is not None}


def read_evaluations(history: History) -> dict[int, Evaluation]:
    points = {
        i: Evaluation(read_rate(row, "eval_real_"), read_rate(row, "eval_dream_"), read_number(row.get("eval_gap"), 1, -1))
        for i, row in history.items()
    }
    return {iteration: each for iteration, each in points.items() if each.real or each.dream}


def read_real_steps(history: History) -> dict[int, int]:
    """Real steps spent in training by the end of each iteration. Empty where none was."""
    spent = accumulate(int(read_number(row.get("real_steps")) or 0) for row in history.values())
    by_iteration = dict(zip(history, spent, strict=True))
    return by_iteration if any(by_iteration.values()) else {}


def whiskers(rates: Iterable[Rate]) -> list[list[float]]:
    """Lengths of the whiskers below and above each rate, for `errorbar`; never negative."""
    below_and_above = [(max(0.0, rate.value - rate.low), max(0.0, rate.high - rate.value)) for rate in rates]
    return [list(lengths) for lengths in zip(*below_and_above, strict=True)]


def draw_progress(axes: "Axes", history: History) -> None:
    axes.set(title="Success", xlabel="iteration", ylim=(0, 1.04), yticks=TICKS)
    axes.grid(axis="y")
    points = read_evaluations(history)
    if training := read_series(history, "train_success", 1):
        look: dict[str, Any] = {"color": FAINT, "alpha": 0.5, "label": "in training"}
        axes.plot(list(training), list(training.values()), ".-", ms=4, lw=1.3, **look)
    for name, color, mark, fill in (("dream", DREAM, "D-", "white"), ("real", REAL, "o-", REAL)):
        rates = {iteration: rate for iteration, row in points.items() if (rate := getattr(row, name))}
        if rates:
            lows, highs = zip(*(rate[2:4] for rate in rates.values()), strict=True)
            axes.fill_between(list(rates), lows, highs, color=color, alpha=0.12, linewidth=0)
            look = {"ms": 9, "mew": 2.2, "elinewidth": 1.6, "capsize": 4, "capthick": 1.6, "clip_on": False, "linewidth": 2.5}
            values = [rate.value for rate in rates.values()]
            look |= {"fmt": mark, "color": color, "mfc": fill, "label": name}
            axes.errorbar(list(rates), values, whiskers(rates.values()), **look)
    if training or points:
        axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.99), ncols=3, handlelength=1.3, columnspacing=1)


def draw_pair(axes: "Axes", history: History, metrics: Sequence[tuple[str, str, float]]) -> None:
    """Draw two metrics, each on its own scale from 0 and in its own colour."""
    axes.set(title=", ".join(name for _, name, _ in metrics), xlabel="iteration")
    axes.grid(axis="y")
    recorded = [(name, most, series) for key, name, most in metrics if (series := read_series(history, key, most))]
    for place, (name, most, series) in enumerate(recorded):
        side, color = axes.twinx() if place else axes, PAIR[place]
        side.plot(list(series), list(series.values()), ".-", ms=4, color=color, linewidth=2)
        side.set_ylim(0, most if math.isfinite(most) else 1.1 * max(series.values()) or 1)
        side.set_title(name, loc="right" if place else "left", color=color)
        side.tick_params(axis="y", colors=color)


def draw_run(history: History, alarms: Collection[int] = ()) -> bytes:
    """Success, curriculum and health of a run as PNG, 2000 x 500 pixels. Args: `alarms`, iterations that are marked.

    A plain `Figure`, not pyplot: no backend is chosen and no global state changes.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    # fixed edges, as matplotlib's own layout would double the time to draw
    edges = {"left": 0.045, "right": 0.955, "top": 0.88, "bottom": 0.16, "wspace": 0.32}
    with style.context(["default", dict(STYLE)]):  # "default" first: a user's own style must not leak in
        figure, buffer = Figure(figsize=(20, 5), dpi=100, facecolor="white"), BytesIO()
        success, curriculum, health = places = figure.subplots(1, 3, gridspec_kw=edges)
        draw_progress(success, history)
        draw_pair(curriculum, history, (UNIFORM, VALUE))
        draw_pair(health, history, (INVALID, ENTROPY))
        for axes in places if history else ():
            axes.set_xlim(min(history) - 0.4, max(history) + 1)
            axes.locator_params(axis="x", integer=True)
            for iteration in alarms if axes.has_data() else ():
                axes.axvline(iteration, color=DREAM, lw=1.5, ls=":")
        for axes in figure.axes:
            if not axes.has_data():
                axes.set_axis_off()
                axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=FAINT)
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
