"""Colours, style and whiskers of the pictures; needs matplotlib to draw."""

from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with any colour vision. Real and dream keep theirs everywhere.
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
"""Of an axis of shares."""


class HasInterval(Protocol):
    """A figure with its interval; no interval where the samples allow none."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


def whiskers(figures: Iterable[HasInterval]) -> list[list[float]]:
    """Lengths of the whiskers below and above each figure, for `errorbar`; 0 without an interval or outside of it."""
    intervals = [(each.value, each.low, each.high) for each in figures]
    below = [0.0 if low is None else max(0.0, value - low) for value, low, _ in intervals]
    above = [0.0 if high is None else max(0.0, high - value) for value, _, high in intervals]
    return [below, above]


def draw_png(
    draw: "Callable[[Figure], None]", *, width: float, height: float, layout: Literal["constrained"] | None = None
) -> bytes:
    """Draw a picture of `width` x `height` hundred pixels and return it as PNG.

    A plain `Figure`, not pyplot: no backend is chosen and no global state changes. Args: `layout`, matplotlib's.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", dict(STYLE)]):  # "default" first: a user's own style must not leak in
        figure, buffer = Figure(figsize=(width, height), dpi=100, facecolor="white", layout=layout), BytesIO()
        draw(figure)
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
