"""RESULTS.md from the figures of finished cells: the rows of an honest proof, intervals over seeds, paired tests, a picture.

Run: python cookbook/reproduce/tables.py   (`run.py` does after each cell)
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.report.curves import DREAM, FAINT, REAL, STYLE
from dreamgym_lg.statistics import wilson

Figures = Mapping[str, Any]
"""The `result.json` of a cell."""
Outcomes = Mapping[int, Mapping[str, bool]]
"""Success of each held-out task, by seed."""
MODES = {"greedy": "greedy", "sampled": "temperature 1"}
BASELINES = {
    **{"start": "start, untrained", "base": "SFT, successes", "filtered": "SFT, filtered", "offline_rl": "offline RL"},
    "drawn": "SFT, drawn tasks too",
}
LEARNERS = {"rft": "second tries", "grpo": "GRPO"}
PLACES = {
    **{"dream": "in the dream", "model": "in a dream of the experience model", "s2r": "in the dream, then real"},
    **{"dream+real": "in the dream and real by turns", "real": "real"},
}
TRAINED = [f"{learner}, {place}" for learner in LEARNERS.values() for place in PLACES.values()]
ASSISTED = ", assisted by the world's rules"
_DRAWS = 4000
NOTE = """\
Real success on held-out tasks. Of several seeds: the mean, with the 95 % interval of a bootstrap over seeds and over the tasks
of each (of two or three seeds it is too narrow; Wilson's where all tasks end alike). Of one seed: Wilson's interval of that
policy, which says nothing of other seeds. Real steps are those of training; so are minutes, those of the last process where a
training was resumed. p: McNemar's exact test of the tasks that only one of both solves, seed by seed.
"""


class Estimate(NamedTuple):
    """A mean over seeds with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def over_seeds(outcomes: Sequence[Sequence[float]]) -> Estimate:
    """The mean of the seeds' means, with a bootstrap over seeds and, within each, over its held-out tasks.

    Of a single seed it is over the tasks alone.
    """
    means = [float(np.mean(each)) for each in outcomes]
    rng, drawn = np.random.default_rng(0), np.zeros(_DRAWS)
    for _ in outcomes:  # each time a seed, and then so many of its tasks
        chosen = rng.integers(len(outcomes), size=_DRAWS)
        for seed, values in enumerate(outcomes):
            tasks = rng.integers(len(values), size=((chosen == seed).sum(), len(values)))
            drawn[chosen == seed] += np.array(values, float)[tasks].mean(axis=1) / len(outcomes)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(np.mean(means)), float(low), float(high))


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact two-sided p of McNemar's test: of paired outcomes, how many only the first and only the second solved."""
    n, least = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(comb(n, i) for i in range(least + 1)) / 2**n)


def compare(first: Outcomes, second: Outcomes) -> tuple[Estimate, list[tuple[int, int]]] | None:
    """First minus second on the same tasks of the same seeds, and by seed how many tasks only one of both solves."""
    pairs = [
        [(bool(first[seed][task]), bool(second[seed][task])) for task in first[seed] if task in second[seed]]
        for seed in first
        if seed in second
    ]
    if not (pairs := [each for each in pairs if each]):
        return None
    by_seed = [(each.count((True, False)), each.count((False, True))) for each in pairs]
    return over_seeds([[a - b for a, b in each] for each in pairs]), by_seed


def rows_of(cells: Iterable[Figures], mode: str) -> dict[str, Outcomes]:
    """The outcomes of every row of a world. A baseline is taken from the first of a seed's cells that played it."""
    rows: dict[str, dict[int, Mapping[str, bool]]] = {}
    for cell in cells:
        for name, modes in cell["real"].items():
            if name == "dreamed":
                continue  # a cell of the dream alone has that row
            title = title_of(cell) if name == "trained" else BASELINES.get(name, name)
            if outcomes := modes.get(mode, {}).get("outcomes"):
                rows.setdefault(title, {}).setdefault(cell["seed"], outcomes)
    return rows


def _place(title: str) -> int:
    """Of a row in its table."""
    return [*BASELINES.values(), *TRAINED, title].index(title.removesuffix(ASSISTED))


def title_of(cell: Figures) -> str:
    """The row of the policy that the cell trained."""
    assisted = cell["assisted"] and cell["place"] != "real"  # reality has rules of its own
    return f"{LEARNERS[cell['learner']]}, {PLACES[cell['place']]}{ASSISTED if assisted else ''}"


def write_tables(folder: Path) -> Path:
    """Write RESULTS.md and success.svg beside the figures in `folder`. Raises `ConfigurationError` for a damaged file."""
    cells = []
    for file in sorted(folder.glob("*.json")):
        try:
            cells.append(json.loads(file.read_text()))
        except ValueError as error:
            raise ConfigurationError(f"{file} is damaged ({error}): delete it and run its cell again") from error
    lines = ["# Results", "", f"Made from the {len(cells)} finished cells in this folder by `run.py`; do not edit.", "", NOTE]
    worlds = {
        name: [cell for cell in cells if cell["world"] == name] for name in dict.fromkeys(cell["world"] for cell in cells)
    }
    if cells:
        draw_success(worlds, folder / "success.svg")
        lines += ["![Success of every row, greedy where it was played](success.svg)", ""]
    for world, own in worlds.items():
        lines += [f"## {world}", "", *_world(own)]
    (written := folder / "RESULTS.md").write_text("\n".join(lines))
    return written


def draw_success(worlds: Mapping[str, Sequence[Figures]], file: Path) -> None:
    """A panel for each world: success of every row with its interval, and a small dot for each seed. As an SVG."""
    panels = {world: _shown(cells) for world, cells in worlds.items()}
    heights = [len(rows) for rows in panels.values()]
    with style.context(["default", {**STYLE, "svg.hashsalt": "success", "svg.fonttype": "none"}]):
        figure = Figure(figsize=(11, 1.3 * len(heights) + 0.5 * sum(heights)), layout="constrained")
        places = figure.subplots(len(heights), squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
        for axes, (world, rows) in zip(places, panels.items(), strict=True):
            seeds = max(map(len, rows.values()))
            axes.set(title=f"{world}: {seeds} seed{'s' * (seeds > 1)}")
            axes.set(xlim=(-0.02, 1.02), ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)), yticklabels=rows)
            axes.grid(axis="x")
            for place, (title, outcomes) in enumerate(rows.items()):
                color = FAINT if title in BASELINES.values() else REAL if title.endswith(", real") else DREAM
                mean = success_of(outcomes)
                axes.plot([mean.low, mean.high], [place] * 2, color=color, lw=3, solid_capstyle="butt")
                axes.plot(mean.value, place, "o", ms=11, color=color)
                of_seeds = [np.mean(list(tasks.values())) for tasks in outcomes.values()]
                axes.plot(of_seeds, [place + 0.28] * len(of_seeds), "o", ms=4, color=color)
        places[-1].set_xlabel("share of held-out tasks solved in the real environment")
        figure.savefig(file, metadata={"Date": None})


def _shown(cells: Sequence[Figures]) -> dict[str, Outcomes]:
    """The rows of a picture: greedy, else sampled where that was not played."""
    rows = {**rows_of(cells, "sampled"), **rows_of(cells, "greedy")}
    return {title: rows[title] for title in sorted(rows, key=_place)}


def _world(cells: Sequence[Figures]) -> list[str]:
    by_mode = {mode: rows_of(cells, mode) for mode in MODES}
    rows, compared = [], []
    for title in sorted({title for found in by_mode.values() for title in found}, key=_place):
        shown = [success_of(by_mode[mode][title]) if title in by_mode[mode] else "–" for mode in MODES]
        own = [cell for cell in cells if title == title_of(cell)]
        spent = f"{np.mean([cell['real_steps']['train'] for cell in own]):,.0f}" if own else "0"
        seconds = [cell["seconds"]["train"] for cell in own if cell["seconds"]["train"] is not None]
        rows.append((title, *shown, spent, f"{np.mean(seconds) / 60:.0f}" if seconds else "–"))
    for mode, found in by_mode.items():
        trained = sorted((title for title in found if title.removesuffix(ASSISTED) in TRAINED), key=_place)
        without = {title: success_of(each).value for title, each in found.items() if title not in trained}
        best = max(without, key=lambda title: without[title], default="")
        for title in trained if best else ():
            if (pair := compare(found[title], found[best])) is not None:
                difference, by_seed = pair
                text = f"{difference.value:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"
                won = "; ".join(f"{only}, {other}" for only, other in by_seed)
                p = "; ".join(f"{mcnemar(only, other):.2g}" for only, other in by_seed)
                compared.append((f"{title} − {best}", MODES[mode], text, won, p))
    head = ("row", *MODES.values(), "real steps", "training, minutes")
    against = ("against the best row without a dream", "mode", "difference", "tasks that only one solves", "p")
    advised = [(cell["cell"], f"advice before training: {cell['advice']['verdict']}") for cell in cells if cell.get("advice")]
    notes = [
        f"* `{name}`: {note}" for name, note in [*advised, *((each["cell"], each["note"]) for each in cells if "note" in each)]
    ]
    return [*_table(head, rows), *_table(against, compared), *notes, *[""][: len(notes)]]


def success_of(outcomes: Outcomes) -> Estimate:
    """The share of successes, with Wilson's interval for one seed and where all tasks end alike (a bootstrap has no width)."""
    seeds = [[int(each) for each in tasks.values()] for tasks in outcomes.values()]
    values = [value for each in seeds for value in each]
    if len(seeds) == 1 or len({*values}) == 1:
        return Estimate(float(np.mean(values)), *wilson(float(sum(values)), len(values)))
    return over_seeds(seeds)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)] + [""]


if __name__ == "__main__":
    print(write_tables(Path(__file__).parent / "results"))
