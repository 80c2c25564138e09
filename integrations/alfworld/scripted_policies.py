"""Scripted policies for ALFWorld: its demonstrator, and the mistakes one can make there."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.alfworld.data import usual_places
from dreamgym_lg.integrations.alfworld.environment import ALFWorld
from dreamgym_lg.integrations.alfworld.text import TOOLS, Goal, Known, follow, goal_of, kind_of, likely_order, names
from dreamgym_lg.integrations.text_games import scripted_policies
from dreamgym_lg.integrations.text_games.scripted_policies import Mistakes, Oracle, View
from dreamgym_lg.types import Task, Trajectory

_ARRIVED = re.compile(r"You arrive at (.+?)\. ")


def create_oracle(task: Task, rng: Random) -> Oracle:
    """The demonstrator of `task`: it searches the room until it sees what is needed, as a policy has to.

    It looks first where such things lie in the train games, in an order drawn by `rng`, and finds back from a
    detour: it puts down what it does not need. Raises `ConfigurationError` for an instruction that is none of ALFWorld's.
    """
    if (goal := goal_of(task.instruction)) is None:
        raise ConfigurationError(f"task {task.id} asks {task.instruction!r}, which is no instruction of ALFWorld's")
    usual, seed = usual_places(str(task.metadata["path"])), rng.randrange(2**32)

    def right(seen: Sequence[str], valid: Sequence[str]) -> str:
        known = follow(seen)
        place, action = _next(goal, known, lambda kind: likely_order(known.places, usual.get(kind, {}), seed))
        away = [other for other in valid if other.startswith("go to ")] or ["look"]
        steps = [action, f"open {place}"] if known.here == place else [f"go to {place}"]
        return next((step for step in steps if step in valid), away[len(seen) % len(away)])

    return right


def _next(goal: Goal, known: Known, order: Callable[[str], list[str]]) -> tuple[str, str]:
    """A place and what to do there; "" for only to look into it. Args: `order`, in which things of a kind are searched for."""
    held, lamp = known.held, "lamp" in goal.place
    target = next((place for place in order("") if kind_of(place) == goal.place), "")
    if held and kind_of(held) != goal.thing:  # a thing too many: down with it, here or elsewhere
        return known.here, f"move {held} to {known.here}"
    if held and goal.treat and (goal.treat, held) not in known.treated:
        tool = next((place for kind in TOOLS[goal.treat] for place in known.places if kind_of(place) == kind), "")
        return tool, f"{goal.treat} {held} with {tool}"
    if held and not lamp:
        return target, f"move {held} to {target}"
    for place, names_there in known.contents.items():
        for name in names_there:
            if held and kind_of(name) == goal.place:
                return place, f"use {name}"
            done = place == target and not (goal.treat and (goal.treat, name) not in known.treated)
            if not held and kind_of(name) == goal.thing and not done:
                return place, f"take {name} from {place}"
    unknown = [place for place in order(goal.place if held else goal.thing) if place not in known.contents]
    return (unknown[0] if unknown else known.here), ""


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
    words = sorted(names([task.observation for task in tasks])) or ["lamp 1"]
    return scripted_policies.scripted_trajectories(
        tasks,
        environment,
        episodes=episodes,
        seed=seed,
        run=run,
        create_oracle=create_oracle,
        mistakes=MISTAKES,
        words=words,
    )
