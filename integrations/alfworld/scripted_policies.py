"""Scripted policies for ALFWorld: its demonstrator, and the mistakes one can make there."""

import re
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

from dreamgym_lg.integrations.alfworld.data import walkthrough
from dreamgym_lg.integrations.alfworld.environment import ALFWorld
from dreamgym_lg.integrations.alfworld.text import names
from dreamgym_lg.integrations.text_games import scripted_policies
from dreamgym_lg.integrations.text_games.scripted_policies import Mistakes, Oracle, View
from dreamgym_lg.types import Task, Trajectory

_TAKE = re.compile(r"take (.+) from (.+)")
_MOVE = re.compile(r"move (.+) to (.+)")
_TREAT = re.compile(r"(?:heat|cool|clean) (.+) with (.+)")
_TAKEN = re.compile(r"You pick up the (.+) from the (.+)\.")
_ARRIVED = re.compile(r"You arrive at (.+?)\. ")
_MOVED = re.compile(r"You move the (.+) to the (.+)\.")


class _Goal(NamedTuple):
    """An action of the walkthrough that is more than the way to a place."""

    action: str
    place: str
    needs: str
    """What has to be in the hand: a thing, "" for nothing, "*" for whatever it is."""
    done: str
    """How the answer to it begins."""


def _goals(actions: Sequence[str]) -> list[_Goal]:
    goals, place = list[_Goal](), ""
    for action in actions:
        if action.startswith("go to "):
            place = action.removeprefix("go to ")
        elif take := _TAKE.fullmatch(action):
            goals.append(_Goal(action, take[2], "", f"You pick up the {take[1]} from"))
        elif move := _MOVE.fullmatch(action):
            goals.append(_Goal(action, move[2], move[1], f"You move the {move[1]} to the {move[2]}."))
        elif treat := _TREAT.fullmatch(action):
            goals.append(_Goal(action, treat[2], treat[1], f"You {action.split(' ')[0]} the {treat[1]} using"))
        elif action.startswith("use "):
            goals.append(_Goal(action, place, "*", f"You turn on the {action.removeprefix('use ')}."))
    return goals


def _approach(action: str, place: str, valid: Sequence[str], tried: int) -> str:
    """`action` if it is possible, else the way to `place`, else away from here, each time elsewhere."""
    away = [other for other in valid if other.startswith("go to ")] or ["look"]
    return next((step for step in (action, f"go to {place}", f"open {place}") if step in valid), away[tried % len(away)])


def create_oracle(task: Task) -> Oracle:
    """The demonstrator of `task`: it plays the stored solution.

    It finds back from a detour: to the place, to an empty hand, to the thing that is needed. After one that undoes what
    was done, such as heating what was cooled, it plays the whole solution again.
    """
    goals = _goals(walkthrough(task))

    def right(seen: Sequence[str], valid: Sequence[str]) -> str:
        done, held, lies, homes = 0, "", dict[str, str](), dict[str, str]()
        for observation in seen:
            if observation.startswith(goals[done % len(goals)].done):
                done += 1
            if taken := _TAKEN.fullmatch(observation):
                held = taken[1]
            elif moved := _MOVED.fullmatch(observation):
                held, lies[moved[1]] = "", moved[2]
        homes = {move[1]: move[2] for goal in goals[:done] if (move := _MOVE.fullmatch(goal.action))}
        goal, tried = goals[done % len(goals)], len(seen)
        if held and goal.needs not in ("*", held):  # a thing too many: to where it belongs, or out of the way
            down = [action for action in valid if action.startswith(f"move {held} to ")]
            place = homes.get(held, goal.place)
            return _approach(down[0] if down and held not in homes else f"move {held} to {place}", place, valid, tried)
        if goal.needs not in ("*", held):  # it was put down again
            place = lies.get(goal.needs, goal.place)
            return _approach(f"take {goal.needs} from {place}", place, valid, tried)
        take = _TAKE.fullmatch(goal.action)
        place = lies.get(take[1], goal.place) if take else goal.place
        return _approach(f"take {take[1]} from {place}" if take else goal.action, place, valid, tried)

    return right


def _wrong(view: View, rng: Random) -> str:
    """Well-formed but not what is needed: another object or place, a thing that is not at hand or of another world."""
    others = [action for action in view.valid if action != view.right]
    places = sorted(names(view.seen[:1]))
    things = sorted(names(view.seen) - set(places)) or list(view.words)
    here = next((place for seen in reversed(view.seen) for place in _ARRIVED.findall(seen)), places[0])
    place = rng.choice([here, rng.choice(places)])  # at the right place with the wrong thing is the nearest miss
    thing, other, foreign = rng.choice(things), rng.choice(things), rng.choice(view.words)
    treat = rng.choice(("heat", "cool", "clean"))
    built = [f"take {thing} from {place}", f"move {thing} to {place}", f"{treat} {thing} with {place}", f"open {place}"]
    rare = [f"close {place}", f"use {thing}", f"examine {thing}", f"slice {thing} with {other}", f"go to {foreign}"]
    verb = view.right.split(" ")[0]
    near = [action for action in others if action.startswith(f"{verb} ")]
    handled = [action for action in others if not action.startswith(("go ", "help", "look", "inventory"))]
    groups = [*[near] * 2, handled, *[built] * 3, rare]
    chosen = rng.choice(rng.choice([group for group in groups if group]))
    return chosen if chosen != view.right else rng.choice(others)


MISTAKES = Mistakes(
    wrong=_wrong,
    verbs=("go", "take", "move", "open", "close", "use", "heat", "cool", "clean", "look", "put", "pick", "examine", "grab"),
    prepositions=("to", "from", "with"),
    misused=("in", "on", "into", "at", "under", "onto"),
)


def scripted_trajectories(
    tasks: Sequence[Task], environment: ALFWorld, *, episodes: Mapping[str, int], seed: int, run: str = "offline"
) -> Iterator[Trajectory]:
    """`episodes[kind]` trajectories of each `Kind`, the tasks taken in turn; the same arguments give the same ones.

    They are played while they are iterated over. A game is loaded anew for each kind, which takes longer than to play it:
    few tasks with many episodes are quicker.
    Raises `ConfigurationError`, before anything is played, for an unknown kind, no task, or one of an evaluation split.
    """
    words = sorted(names([str(task.metadata.get("observation", "")) for task in tasks])) or ["lamp 1"]
    return scripted_policies.scripted_trajectories(
        tasks,
        environment,
        episodes=episodes,
        seed=seed,
        run=run,
        create_oracle=lambda task, rng: create_oracle(task),
        mistakes=MISTAKES,
        words=words,
    )
