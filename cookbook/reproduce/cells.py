"""The cells of the comparison: methods, worlds, seeds, budgets, and in which order they are run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from typing import Literal, NamedTuple, get_args

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Place
from dreamgym_lg.learner import LearnerName

Part = Literal["comparison", "learners", "ablations", "data", "transfer"]
Without = Literal["replay", "reasoning", "check", "hidden"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a policy is trained, from the base policy of its world and seed."""

    name: str
    title: str
    part: Part
    """Of the whole: the parts are run in this order, each for all seeds."""
    learner: LearnerName | None = None
    """None: supervised alone."""
    place: Place = "dream"
    without: Without | None = None
    """What of the method is left out."""
    trajectories: int | None = None
    """How many offline trajectories the experience model has. None: all."""
    moved: tuple[str, str] | None = None
    """World and method of the cell whose policy is judged here, without any training here."""
    worlds: Sequence[str] = ("peckingorder", "twc", "coin", "simonsays", "sorting", "mapreader", "desk", "alfworld")
    """Those in which the method means anything."""


GAMES = ("peckingorder", "twc", "coin", "simonsays", "sorting", "mapreader")
DEFAULT_WORLDS = (*GAMES, "desk")
"""Six games of TextWorld-Express, and the support desk of this cookbook."""
WORLDS = (*DEFAULT_WORLDS, "alfworld")
"""ALFWorld's pick-and-place tasks as well, which need a package and games that do not come with `dreamgym-lg[all]`."""
SIZES = (100, 200, 400, 800)
"""Offline trajectories of the experience model, of about five steps each."""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(name="sft", title="SFT: the base policy", part="comparison"),
        Method(name="sft-more", title="SFT, 300 steps more on every success", part="comparison"),
        Method(name="real-grpo", title="GRPO, real", part="comparison", learner="grpo", place="real"),
        Method(name="dream-grpo", title="DreamGym GRPO", part="comparison", learner="grpo"),
        Method(name="s2r-grpo", title="DreamGym-S2R GRPO", part="comparison", learner="grpo", place="s2r"),
        Method(name="dream-ppo", title="DreamGym PPO", part="learners", learner="ppo"),
        Method(name="real-ppo", title="PPO, real", part="learners", learner="ppo", place="real"),
        Method(name="s2r-ppo", title="DreamGym-S2R PPO", part="learners", learner="ppo", place="s2r"),
        Method(name="real-rft", title="RFT, real", part="learners", learner="rft", place="real"),
        Method(name="real-dpo", title="DPO, real", part="learners", learner="dpo", place="real"),
        Method(name="no-check", title="without the action check", part="ablations", learner="grpo", without="check",
               worlds=[game for game in GAMES if game != "simonsays"]),
        Method(name="no-replay", title="without replay", part="ablations", learner="grpo", without="replay"),
        Method(name="no-reasoning", title="without reasoning", part="ablations", learner="grpo", without="reasoning",
               worlds=GAMES),
        Method(name="no-hidden", title="without hidden facts", part="ablations", learner="grpo", without="hidden",
               worlds=("peckingorder",)),
        *(
            Method(name=f"data-{n}", title=f"{n} trajectories", part="data", learner="grpo", trajectories=n, worlds=GAMES)
            for n in SIZES
        ),
        *(
            Method(name=f"moved-{name}-of-{game}", title=f"{title} of {game}", part="transfer", moved=(game, name),
                   worlds=[other for other in GAMES if other != game])
            for game in GAMES
            for name, title in (("sft", "SFT"), ("dream-grpo", "DreamGym GRPO"))
        ),
    )
}  # fmt: skip


class Cell(NamedTuple):
    """One figure of the comparison: a method on a world, with a seed and a budget."""

    world: str
    method: str
    seed: int
    iterations: int
    """Of training; a supervised cell is the same in every budget and has 0."""

    def __str__(self) -> str:
        budget = f"i{self.iterations}." if self.iterations else ""
        return f"{self.world}.{self.method}.{budget}seed{self.seed}"

    def of(self, method: str) -> "Cell":
        """The cell of another method beside it."""
        return create_cell(self.world, method, self.seed, self.iterations)


def create_cell(world: str, method: str, seed: int, iterations: int) -> Cell:
    """The cell of these. Raises `ConfigurationError` for an unknown method, and for a world that it has no cell of."""
    if method not in METHODS:
        raise ConfigurationError.unknown("method", method, METHODS)
    if world not in METHODS[method].worlds:
        raise ConfigurationError.unknown("world", world, METHODS[method].worlds)
    trained = METHODS[moved[1]] if (moved := METHODS[method].moved) else METHODS[method]
    return Cell(world, method, seed, iterations if trained.learner else 0)


def all_cells(worlds: Iterable[str], seeds: Iterable[int], iterations: int) -> list[Cell]:
    """Every cell, in the order in which they are run: the comparison first, for every seed, then ablations, data
    sizes, and policies moved to another game."""
    parts, order, wanted = get_args(Part), list(METHODS), list(worlds)
    chosen = [
        create_cell(world, name, seed, iterations)
        for seed, world, (name, method) in product(seeds, wanted, METHODS.items())
        if world in method.worlds
    ]

    def place(cell: Cell) -> tuple[int, ...]:
        part = parts.index(METHODS[cell.method].part)
        return part, cell.seed, wanted.index(cell.world), order.index(cell.method)

    return sorted(chosen, key=place)


def matching(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """The cells whose name fits one of the patterns (`*` stands for anything), or has one of them between its dots.

    Raises `ConfigurationError` for a pattern that fits none.
    """
    found: dict[Cell, None] = {}
    for pattern in patterns:
        fitting = [cell for cell in cells if fnmatch(str(cell), pattern) or pattern in str(cell).split(".")]
        if not fitting:
            raise ConfigurationError(f"--only {pattern!r} fits none of the {len(cells)} cells; --list shows their names")
        found |= dict.fromkeys(fitting)
    return [cell for cell in cells if not patterns or cell in found]
