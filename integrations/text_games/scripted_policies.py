"""Scripted policies for text games: offline episodes with right and wrong actions.

A model that saw only demonstrations believes that everything succeeds, so all other kinds err on purpose.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Literal, get_args

from dreamgym_lg.environment import record_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.game import TextGame
from dreamgym_lg.types import Step, Task, Trajectory

Kind = Literal["demonstration", "noisy", "random"]
"""`demonstration`: the shortest solution.  `noisy`: three of ten actions are strays.  `random`: strays alone."""
KINDS: tuple[Kind, ...] = get_args(Kind)

Oracle = Callable[[Sequence[str], Sequence[str]], str]
"""The demonstrator of one task: `(observations, valid actions) -> right action`."""
CreateOracle = Callable[[Any, Task, Random], Oracle]
"""`(environment, task, rng)`: the demonstrator of a task; where several solutions are right, `rng` chooses."""


def collect_episodes(
    create_oracle: CreateOracle, tasks: Sequence[Task], environment: TextGame, *, episodes: Mapping[str, int], seed: int
) -> Iterator[Trajectory]:
    """`episodes[kind]` trajectories of each `Kind`, the tasks taken in turn. They are played while they are iterated over.

    The same arguments give the same trajectories, where the demonstrator does.
    Raises `ConfigurationError`, before anything is played, for an unknown kind, no task, or one of an evaluation split.
    """
    for kind in episodes:
        if kind not in KINDS:
            raise ConfigurationError.unknown("kind", kind, KINDS)
    for task in tasks:
        if task.split != "train":
            raise ConfigurationError(f"task {task.id} is a {task.split} task: offline trajectories of it would leak it")
    if not tasks:
        raise ConfigurationError("scripted policies need at least one task of the train split, got none")
    played = dict.fromkeys((task.id for task in tasks), 0)
    for kind, count in episodes.items():
        order = Random(f"{seed} {kind}").sample(tasks, len(tasks))
        for number in range(count):
            task, rng = order[number % len(order)], Random(f"{seed} {kind} {number}")
            steps, success = play_episode(kind, create_oracle, environment, task, rng)
            yield Trajectory(task=task, steps=steps, success=success, run="offline", rollout_index=played[task.id])
            played[task.id] += 1


def play_episode(
    kind: str, create_oracle: CreateOracle, environment: TextGame, task: Task, rng: Random
) -> tuple[list[Step], bool]:
    """The steps of one episode and whether it succeeded.

    Actions are checked as a policy's are: a refused one costs a step of the policy, of which there are
    `environment.max_steps`, but no real step.
    """
    astray = {"demonstration": 0.0, "random": 1.0}.get(kind, 0.3)
    oracle = create_oracle(environment, task, rng)
    seen, steps = [environment.reset(task)], list[Step]()
    while True:
        valid = environment.valid_actions()
        action = oracle(seen, valid)
        if rng.random() < astray:
            action = stray(action, valid, rng)
        last = len(steps) + 1 >= environment.max_steps
        step, success = record_action(action, seen[-1], environment.step(action), last=last)
        steps.append(step)
        seen.append(step.next_observation)
        if step.terminated or step.truncated:
            return steps, success


def stray(right: str, valid: Sequence[str], rng: Random) -> str:
    """Another action than the right one. A valid one, of its verb half the time; or a broken one, mostly invalid."""
    others = [action for action in valid if action != right] or [right]
    near = [action for action in others if _verb(action) == _verb(right)]
    other = rng.choice(near if near and rng.random() < 0.5 else others)
    if rng.random() < 0.7:
        return other
    words = right.split(" ")
    words[rng.randrange(len(words))] = rng.choice([*other.split(" "), ""])
    return " ".join(filter(None, words))


def _verb(action: str) -> str:
    match = re.match(r"\w+", action)
    return match[0] if match else ""
