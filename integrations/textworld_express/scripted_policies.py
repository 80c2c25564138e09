"""Scripted policies for TextWorld-Express: its demonstrators, and the mistakes one can make there."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from random import Random

from dreamgym_lg.integrations.text_games import scripted_policies
from dreamgym_lg.integrations.text_games.scripted_policies import Mistakes, Oracle, View
from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress
from dreamgym_lg.integrations.textworld_express.text import movable_items
from dreamgym_lg.types import Task, Trajectory

_PUT = re.compile(r"You put the (.+) in the (.+)\.")


def _told(seen: Sequence[str], valid: Sequence[str]) -> str:
    """The next right action of `peckingorder`: do what the book last said, or read it if something moved since."""
    for observation in reversed(seen):
        if told := re.fullmatch(r"The current task is to (.+)\.", observation):
            return told[1].replace("take the ", "take ")
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
    """The demonstrator of `task`.

    `peckingorder` only needs its book. `twc` in one room brings the items, in random order, to where the gold path puts them.
    Both find back from any detour. Every other world is played by the gold path, which a detour may break.
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


MISTAKES = Mistakes(
    wrong=_wrong,
    verbs=("take", "put", "open", "close", "read", "move", "go", "eat", "grab", "use", "look"),
    prepositions=("in",),
    misused=("on", "into", "to", "at", "under", "with"),
)


def scripted_trajectories(
    tasks: Sequence[Task],
    environment: TextWorldExpress,
    *,
    episodes: Mapping[str, int],
    seed: int,
    run: str = "offline",
) -> Iterator[Trajectory]:
    """`episodes[kind]` trajectories of each `Kind`, the tasks taken in turn; played while they are iterated over.

    The same arguments give the same trajectories, except where gold paths vary (`TextWorldExpress.gold_path`).
    Raises `ConfigurationError`, before anything is played, for an unknown kind, no task, or one of an evaluation split.
    """
    words = sorted({item for task in tasks for item in movable_items(task.observation)}) or ["lamp"]
    return scripted_policies.scripted_trajectories(
        tasks,
        environment,
        episodes=episodes,
        seed=seed,
        run=run,
        create_oracle=partial(create_oracle, environment),
        mistakes=MISTAKES,
        words=words,
    )
