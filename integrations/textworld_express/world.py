"""TextWorld-Express as the world of an experiment, and the scripted policies that collect its traces."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random
from typing import Any

from dreamgym_lg.curriculum.task_generator import TaskGenerator
from dreamgym_lg.dream import Dream, Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experiment.settings import Settings
from dreamgym_lg.experiment.world import World
from dreamgym_lg.integrations.text_games.game import Rules, Score
from dreamgym_lg.integrations.text_games.scripted_policies import Oracle, ScriptedPolicies, View
from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress, make_tasks
from dreamgym_lg.integrations.textworld_express.text import (
    GAMES,
    STATE_KNOWN,
    VARIED,
    Check,
    check_action,
    failed_on,
    hidden_facts,
    movable_items,
    vary_task,
)
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Split, Task, Trajectory

EPISODES = {"demonstration": 1, "random": 400, "unfinished": 1500}
_OWN: Mapping[str, Mapping[str, Any]] = {
    "peckingorder": {  # the demo's: what about eight minutes on two cores are enough for
        "policy_tokens": 16,
        "experience_steps": 130,
        "iterations": 8,
        "evaluate_every": 8,
        "proof_tasks": 64,
        "panel_tasks": 32,
    },
    "twc": {
        "tasks": 5000,
        "episodes": {"demonstration": 60, "unfinished": 750, "unfinished_wrong": 750},  # most places are wrong for an object
        "experience_steps": 300,
    },
}
"""Settings in which a game differs from `TextWorldExpressWorld.settings`."""


class TextWorldExpressWorld(World):
    """One game: its worlds of the train fold, split by a hash of their first observation.

    The panel `unseen objects` holds worlds of the game's own test fold, which shares no object with the train fold.

    Args:
        game: One of `text.GAMES`.
        check: As of `text.check_action`. Default: `state` for the games of `STATE_KNOWN`, else `names`.
        max_steps: Actions after which an episode is truncated.

    Raises `ConfigurationError` for an unknown game.
    """

    settings = Settings(
        tasks=2500,
        episodes=EPISODES,
        retrieved=1,
        retrieved_characters=80,
        experience_steps=200,
        experience_tokens=400,
        policy_tokens=32,
        iterations=20,
        batch_size=4,
        synthetic_share=0.5,
        stop_after_uniform=0,  # groups that all fail alike are not done: later ones of other worlds differ again
    )
    assisted = True
    context = staticmethod(hidden_facts)

    def __init__(self, game: str = "peckingorder", *, check: Check | None = None, max_steps: int = 10) -> None:
        if game not in GAMES:
            raise ConfigurationError.unknown("game", game, GAMES)
        self.game, self.max_steps = game, max_steps
        self.name = f"textworld_express/{game}"
        self.settings = replace(self.settings, **_OWN.get(game, {}))
        self.check: Check = check or ("state" if game in STATE_KNOWN else "names")
        self.arguments = {"check": self.check, "max_steps": max_steps}
        self._made: dict[range, list[Task]] = {}

    def tasks(self, split: Split, *, limit: int | None = None, seed: int = 0) -> list[Task]:
        """As `World.tasks`: those with different first observations among `limit` worlds (None: those of `settings`)."""
        seeds = _seeds(limit or self.settings.tasks or 0, seed)
        if seeds not in self._made:
            self._made[seeds] = self._make(seeds, "train")
        return [task for task in self._made[seeds] if task.split == split]

    def create_environment(self) -> TextWorldExpress:
        return TextWorldExpress(max_steps=self.max_steps, check=self.check)

    def create_dream(self, model: Model) -> Dream:
        return Dream([Rules(self.refusal), model], judges=[Score(completes=True, once=True)])

    def refusal(self, task: Task, action: str, observations: Sequence[str]) -> str | None:
        return check_action(self.game, action, observations, check=self.check)

    def collect(self, tasks: Sequence[Task], episodes: Mapping[str, int], *, seed: int) -> Iterator[Trajectory]:
        with closing(self.create_environment()) as environment:
            yield from POLICIES.trajectories(tasks, environment, episodes=episodes, seed=seed)

    def panels(self, *, limit: int, seed: int = 0) -> dict[str, list[Task]]:
        return {"unseen objects": self._make(_seeds(limit, seed), "test")}

    def task_generator(self, tasks: Sequence[Task], replay_buffer: ReplayBuffer) -> TaskGenerator | None:
        """`vary_task`, of all training tasks; items that episodes failed on stay."""
        if self.game not in VARIED:
            return None
        seen = [task.observation for task in tasks]

        def vary(task: Task, trajectories: Sequence[Trajectory], rng: Random) -> Task | None:
            return vary_task(task, rng, seen, keep=failed_on(task, trajectories))

        return vary

    def _make(self, seeds: range, fold: str) -> list[Task]:
        with closing(self.create_environment()) as environment:
            return make_tasks(self.game, seeds, environment=environment, fold=fold)


def _seeds(count: int, seed: int) -> range:
    return range(seed * 100_000, seed * 100_000 + count)


def twc(**arguments: Any) -> TextWorldExpressWorld:
    """The world `twc` of the command line."""
    return TextWorldExpressWorld("twc", **arguments)


# --- Scripted policies -----------------------------------------------------------------------------------------------

_PUT = re.compile(r"You put the (.+) in the (.+)\.")


def _told(seen: Sequence[str], valid: Sequence[str]) -> str:
    """The next right action of `peckingorder`: do what the book last said, or read it if something moved since."""
    for observation in reversed(seen):
        if request := re.fullmatch(r"The current task is to (.+)\.", observation):
            return request[1].replace("take the ", "take ")
        if observation.startswith(("You take ", "You put ")):
            break
    return next((action for action in valid if action.startswith("read ")), "look around")


def _tidied(goals: Mapping[str, str], seen: Sequence[str], valid: Sequence[str]) -> str:
    """The next right action of `twc` in one room, whatever came before: bring the first item that is out of place."""
    now: dict[str, str] = {}
    for observation in seen:
        if put := _PUT.fullmatch(observation):
            now[put[1]] = put[2]
        elif observation.startswith("You take the "):
            now.pop(observation[13:-1], None)
    for item, place in goals.items():
        if now.get(item) != place:
            for action in (f"put {item} in {place}", f"take {item}", f"open {place}"):
                if action in valid:
                    return action
    return "look around"


def create_oracle(environment: TextWorldExpress, task: Task, rng: Random) -> Oracle:
    """The demonstrator of `task`: the book of `peckingorder`, the places of `twc` in one room, else the gold path.

    The first two find back from any detour; it may break a gold path.
    """
    if task.metadata["game"] == "peckingorder":
        return _told
    path = environment.gold_path(task)
    if task.metadata["game"] == "twc" and not any(action.startswith("move ") for action in path):
        goals = [(put[1], put[2]) for action in path if (put := re.fullmatch(r"put (.+) in (.+)", action))]
        order = dict(rng.sample(goals, len(goals)))
        return lambda seen, valid: _tidied(order, seen, valid)
    rest = iter(path)
    return lambda seen, valid: next((action for action in rest if action in valid), "look around")


def _wrong(view: View, rng: Random) -> str:
    """Well-formed but not what is needed: another object or place, a repetition, a thing of another world."""
    others = [action for action in view.valid if action != view.right]
    verb = view.right.split(" ")[0]
    puts = [f"put {put[1]} in {put[2]}" for seen in view.seen if (put := _PUT.fullmatch(seen))]
    takes = [f"take {seen[13:-1]}" for seen in view.seen if seen.startswith("You take the ")]
    places = [action.split(" in ")[-1] for action in view.valid if action.startswith("put ")] or ["shelf", "counter"]
    word = rng.choice(view.words)
    elsewhere = [f"take {word}", f"put {word} in {rng.choice(places)}", f"open {word}"]
    starts = (f"{verb} ", "put ", ("take ", "close "))
    valid = [[action for action in others if action.startswith(start)] for start in starts]
    # the near miss, right but for its object, is what an experience model has most trouble to tell from the right action
    return rng.choice(rng.choice([some for some in (*valid[:1] * 4, *valid[1:], puts, takes, elsewhere) if some]))


def _words(tasks: Sequence[Task]) -> list[str]:
    return sorted({item for task in tasks for item in movable_items(task.observation)}) or ["lamp"]


POLICIES = ScriptedPolicies(
    create_oracle,
    _words,
    _wrong,
    verbs=("take", "put", "open", "close", "read", "move", "go", "eat", "grab", "use", "look"),
    prepositions=("in",),
    misused=("on", "into", "to", "at", "under", "with"),
)
