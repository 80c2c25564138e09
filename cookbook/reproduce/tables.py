"""RESULTS.md, results.csv and results.png from the figures of finished cells, with intervals and paired tests."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cells import GAMES, METHODS, WORLDS
from estimates import Estimate, Figures, compare, over_seeds, saving, savings_over_seeds, steps_until

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.statistics import wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODES = {"greedy": "greedy", "sampled": "temperature 1"}
COMPARISONS = (
    ("real-grpo", "sft"), ("dream-grpo", "sft"), ("dream-grpo", "sft-more"), ("dream-grpo", "real-grpo"),
    ("s2r-grpo", "real-grpo"), ("s2r-grpo", "dream-grpo"),
    ("dream-ppo", "real-ppo"), ("s2r-ppo", "real-ppo"), ("dream-ppo", "dream-grpo"),
    ("real-rft", "real-grpo"), ("real-dpo", "real-grpo"),
    *((f"moved-dream-grpo-of-{game}", f"moved-sft-of-{game}") for game in GAMES),
    ("no-check", "dream-grpo"), ("no-replay", "dream-grpo"), ("no-hidden", "dream-grpo"),
)  # fmt: skip
"""Which pairs of methods are tested."""
FURTHER = {
    "ablations": "Ablations of DreamGym GRPO",
    "data": "Data of the experience model",
    "transfer": "Policies of other games, not trained in this one",
}
"""Tables of their own, by the part of their methods."""


# --- tables ----------------------------------------------------------------------------------------------------------------


def load_results(folder: Path) -> list[Figures]:
    """The figures of every finished cell, in the order of the methods."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            found.append(json.loads(file.read_text()))
        except ValueError as error:
            raise ConfigurationError(f"{file} is damaged ({error}): restore it, or delete it and run its cell again") from error
    order = list(METHODS)
    return sorted(found, key=lambda f: (WORLDS.index(f["world"]), order.index(f["method"]), f["seed"]))


Budget = tuple[str, int]
"""World and iterations."""


def by_budget(results: Iterable[Figures]) -> dict[Budget, dict[str, list[Figures]]]:
    """The cells of each world and budget by method; supervised ones, which have no budget, are in each of their world."""
    found: dict[Budget, dict[str, list[Figures]]] = {}
    listed = list(results)
    for each in listed:
        if each["iterations"]:
            found.setdefault((each["world"], each["iterations"]), {})
    for world in dict.fromkeys(each["world"] for each in listed):
        if not any(key[0] == world for key in found):
            found[world, 0] = {}
    for (world, iterations), methods in found.items():
        for each in listed:
            if each["world"] == world and each["iterations"] in (0, iterations):
                methods.setdefault(each["method"], []).append(each)
    return found


def success(cells: Iterable[Figures], mode: str, place: str = "real") -> Estimate | None:
    """Success of a method over its seeds; None where it was not played."""
    played = [each[place][mode]["outcomes"] for each in cells if mode in each[place]]
    return over_seeds([[int(x) for x in outcomes] for outcomes in played]) if played else None


def write_tables(folder: Path) -> list[Path]:
    """Write RESULTS.md, results.csv and, where matplotlib is installed, results.png beside the figures in `folder`.

    What was tried in a world beside its cells, and what holds it back, is taken from `remarks/WORLD.md` there.
    """
    results = load_results(folder)
    written = [folder / "RESULTS.md", folder / "results.csv"]
    remarks = {file.stem: file.read_text() for file in sorted((folder / "remarks").glob("*.md"))}
    written[0].write_text(_markdown(results, remarks))
    with written[1].open("w", newline="") as file:
        rows = [_flat(each) for each in results]
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if results and (picture := _picture(results)) is not None:
        (folder / "results.png").write_bytes(picture)
        written.append(folder / "results.png")
    return written


def _flat(each: Figures) -> dict[str, Any]:
    row = {key: each[key] for key in ("cell", "world", "method", "seed", "iterations", "episodes")}
    for place, mode in (("real", "greedy"), ("real", "sampled"), ("dream", "sampled")):
        if played := each[place].get(mode):
            low, high = wilson(played["successes"], played["episodes"])
            row |= {f"{place}_{mode}_{key}": played[key] for key in ("successes", "episodes", "reward")}
            row |= {f"{place}_{mode}_low": round(low, 4), f"{place}_{mode}_high": round(high, 4)}
    row |= {f"real_steps_{kind}": steps for kind, steps in each["real_steps"].items()}
    row |= {"dreamed_steps": each["dreamed_steps"], "best_iteration": each["best_iteration"]}
    row |= {f"seconds_{stage}": seconds for stage, seconds in each["seconds"].items()}
    return row | {"machine": each["machine"]}


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [" | ".join(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    return [f"| {line} |" for line in lines] + [""]


NOTE = """\
Real success on held-out worlds. Of several seeds: the mean, with the 95 % interval of a bootstrap over seeds and over the
worlds of each (of two or three seeds it is too narrow). Of one seed: Wilson's interval of that policy, which says nothing of
other seeds. Real steps: every step that reached the real environment, on average over the seeds. *Training*: the policy's
rollouts. *Choosing*: validation episodes, by which base and policy are chosen. *Offline*: recorded before training by scripted
policies; every method begins at the same base policy, which was supervised on the successes among them. Those of the final
evaluation come on top. Minutes are wall time on a machine that had other work too.
"""


KINDS = ("training", "validation")
EQUAL_SUCCESS = """\
Training in reality counts until an iteration whose own 64 episodes succeed as often; `>`: it never does. Over seeds: the
geometric mean with the 95 % interval of a bootstrap over seeds, in which `>` counts as the number behind it.
"""


def _markdown(results: Sequence[Figures], remarks: Mapping[str, str]) -> str:
    lines = ["# Results", "", f"Made from the {len(results)} finished cells in this folder by `run.py`; do not edit.", "", NOTE]
    for (world, iterations), methods in by_budget(results).items():
        lines += _world(world, iterations, methods, remarks)
    absent = remarks.keys() - {each["world"] for each in results}
    lines += [line for world in sorted(absent) for line in (f"## {world}: no cell", "", remarks[world])]
    return "\n".join([*lines, "## Every policy", "", *_policies(results)])


def _world(world: str, iterations: int, methods: Mapping[str, Sequence[Figures]], remarks: Mapping[str, str]) -> list[str]:
    trained = [each for cells in methods.values() for each in cells if each["episodes"]]
    episodes = "/".join(str(n) for n in sorted({each["episodes"] for each in trained}))
    budget = f"Every trained policy: {iterations} iterations, {episodes} episodes; S2R has its real steps on top."
    lines = [f"## {world}, {iterations} iterations", "", budget, ""] if iterations else [f"## {world}", ""]
    lines += [remarks[world]] if world in remarks else []
    main = {name: cells for name, cells in methods.items() if METHODS[name].part in ("comparison", "learners")}
    lines += _methods(main)
    for part, title in FURTHER.items():
        if chosen := {name: cells for name, cells in methods.items() if METHODS[name].part == part}:
            whole = {"dream-grpo": methods["dream-grpo"]} if "dream-grpo" in methods else {}
            lines += [f"### {title}", "", *_methods({**whole, **chosen})]
    lines += _real_steps_for_equal_success(methods)
    compared = [
        (METHODS[a].title, METHODS[b].title, MODES[mode], found)
        for a, b in COMPARISONS
        for mode in MODES
        if a in methods and b in methods and (found := compare(methods[a], methods[b], mode)) is not None
    ]
    if not compared:
        return lines
    rows = [
        (a, b, mode, f"{_signed(found.difference)}", found.difference.seeds, f"{found.only_first}, {found.only_second}",
         f"{found.p:.2g}")
        for a, b, mode, found in compared
    ]  # fmt: skip
    head = ("first", "second", "mode", "first − second", "seeds", "worlds that only one solves", "p (McNemar, exact)")
    return [
        *lines,
        "### On the same worlds",
        "",
        "p is of these policies; it says nothing of other seeds.",
        "",
        *_table(head, rows),
    ]


def _real_steps_for_equal_success(methods: Mapping[str, Sequence[Figures]]) -> list[str]:
    """How many times fewer real steps than training in reality alone, at the same real success: by seed, and over them."""
    rows = []
    for place, learner in product(("dream", "s2r"), ("grpo", "ppo")):
        real = {each["seed"]: each for each in methods.get(f"real-{learner}", ()) if "real_steps" in each["training"][0]}
        cells = [each for each in methods.get(f"{place}-{learner}", ()) if each["seed"] in real]
        found = [[saving(each, real[each["seed"]], kinds) for each in cells] for kinds in (("training",), KINDS)]
        for each, *times in zip(cells, *found, strict=True):
            other, played = real[each["seed"]], each["real"]["sampled"]
            own = f"{each['real_steps']['training']:,}, {each['real_steps']['validation']:,}"
            needed = steps_until(other, played["successes"] / played["episodes"])
            told = f"not in {other['real_steps']['training']:,}" if needed is None else f"{needed:,}"
            shown = ("–" if time is None else str(time) for time in times)
            rows.append((METHODS[each["method"]].title, each["seed"], _counted(played), own, told, *shown))
        if len(cells) > 1:
            known = ([time for time in times if time is not None] for times in found)
            over = (savings_over_seeds(times) if times else "–" for times in known)
            rows.append((METHODS[cells[0]["method"]].title, f"all {len(cells)}", "", "", "", *over))
    if not rows:
        return []
    head = ("method", "seed", "temperature 1", "its real steps: training, choosing", "training in reality needs",
            "times its own", "with choosing on both sides")  # fmt: skip
    return ["### Real steps for the same success", "", EQUAL_SUCCESS, *_table(head, rows)]


def _signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.2f} [{estimate.low:+.2f}, {estimate.high:+.2f}]"


def _methods(methods: Mapping[str, Sequence[Figures]]) -> list[str]:
    head = ("method", "seeds", "greedy", "temperature 1", "dreamed, temperature 1", "real steps: training", "choosing",
            "offline", "dreamed steps", "training, minutes")  # fmt: skip
    rows = []
    for name, cells in methods.items():
        steps: dict[str, float] = defaultdict(float)
        for each in cells:
            for kind, count in each["real_steps"].items():
                steps[kind] += count / len(cells)
        dreamed = sum(each["dreamed_steps"] for each in cells) / len(cells)
        minutes = sum(each["seconds"]["train"] for each in cells) / len(cells) / 60
        shown = [success(cells, "greedy"), success(cells, "sampled"), success(cells, "sampled", "dream")]
        counts = [f"{count:,.0f}" for count in (steps["training"], steps["validation"], steps["offline"], dreamed)]
        rows.append(
            (METHODS[name].title, len(cells), *("–" if e is None else str(e) for e in shown), *counts, f"{minutes:.0f}")
        )
    return _table(head, rows)


def _policies(results: Iterable[Figures]) -> list[str]:
    head = ("cell", "greedy", "temperature 1", "dreamed", "kept after iteration", "real steps: training", "machine")
    rows = []
    for each in results:
        shown = [
            _counted(each["real"].get("greedy")),
            _counted(each["real"].get("sampled")),
            _counted(each["dream"].get("sampled")),
        ]
        best = each["best_iteration"] if each["best_iteration"] is not None else "–"
        rows.append((f"`{each['cell']}`", *shown, best, f"{each['real_steps']['training']:,}", each["machine"]))
    return _table(head, rows)


def _counted(played: Mapping[str, Any] | None) -> str:
    if not played:
        return "–"
    low, high = wilson(played["successes"], played["episodes"])
    return f"{played['successes']}/{played['episodes']} [{low:.2f}, {high:.2f}]"


# --- picture -----------------------------------------------------------------------------------------------------------------


def _picture(results: Sequence[Figures]) -> bytes | None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    from dreamgym_lg.report.curves import draw_png

    columns = by_budget(results)
    most = max(len(methods) for methods in columns.values())
    return draw_png(
        lambda figure: _draw(figure, columns), width=4 + 6 * len(columns), height=2.5 + 0.5 * most, layout="constrained"
    )


def _draw(figure: "Figure", columns: Mapping[Budget, Mapping[str, Sequence[Figures]]]) -> None:
    from dreamgym_lg.report.curves import DREAM, FAINT, REAL, TICKS, whiskers

    shown = [name for name in METHODS if any(name in methods for methods in columns.values())]
    panels: Any = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, ((world, iterations), methods) in zip(panels, columns.items(), strict=True):
        axes.set(title=f"{world}, {iterations} iterations", xlim=(0, 1.02), xticks=TICKS, xlabel="real success, temperature 1")
        axes.grid(axis="x")
        for y, name in enumerate(shown):
            if not (cells := methods.get(name)):
                continue
            method, found = METHODS[name], success(cells, "sampled")
            assert found is not None
            color = FAINT if method.learner is None else REAL if method.place == "real" else DREAM
            axes.barh(y, found.value, 0.62, color=color, alpha=0.35)
            axes.errorbar([found.value], [y], xerr=whiskers([found]), fmt="o", color=color, capsize=4)
            rates = [each["real"]["sampled"]["successes"] / each["real"]["sampled"]["episodes"] for each in cells]
            axes.plot(rates, [y] * len(rates), "|", color=color, ms=12)
        axes.set_yticks(range(len(shown)), [METHODS[name].title for name in shown])
    panels[0].invert_yaxis()
