"""Scripted policies for text games: offline trajectories that teach an experience model what fails, and how.

A model that saw only demonstrations believes that everything succeeds, so most of the kinds below err on purpose. An
adapter brings what only its game knows: which action is right (`Oracle`), and how one errs there (`Mistakes`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Literal, NamedTuple, cast, get_args

from dreamgym_lg.environment import play_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.environment import TextGame
from dreamgym_lg.types import Step, Task, Trajectory

Kind = Literal["demonstration", "noisy", "random", "malformed", "fluent_wrong", "mixture", "unfinished", "unfinished_wrong"]
"""`demonstration`: the shortest solution.  `noisy`: a solution with stray actions in between.  `random`: valid actions.
`malformed`: mostly broken commands.  `fluent_wrong`: right form, wrong object or place, from some point on.
`mixture`: each step is of a kind drawn anew.
`unfinished`, `unfinished_wrong`: as `noisy` and `fluent_wrong`; where one would have succeeded its last step is left out, so
that none of several steps is a success."""
KINDS: tuple[Kind, ...] = get_args(Kind)


class View(NamedTuple):
    """What a scripted policy chooses its next action from."""

    seen: Sequence[str]
    """All observations of the episode, oldest first."""
    valid: Sequence[str]
    right: str
    """The oracle's action."""
    words: Sequence[str]
    """Names of things of any world of the game, at least one."""


Oracle = Callable[[Sequence[str], Sequence[str]], str]
"""The demonstrator of one task: `(observations, valid actions) -> right action`."""
CreateOracle = Callable[[Task, Random], Oracle]
"""The demonstrator of a task; where several solutions are right, `Random` chooses."""


class Mistakes(NamedTuple):
    """How one errs in a game."""

    wrong: Callable[[View, Random], str]
    """A well-formed action that is not what is needed."""
    verbs: Sequence[str]
    """What a broken command may begin with, words that the game does not know among them."""
    prepositions: Sequence[str]
    """Those of the game."""
    misused: Sequence[str]
    """Others, which take their place."""


def corrupt(action: str, mistakes: Mistakes, rng: Random) -> str:
    """A broken version of a command, as a weak policy writes them."""
    words = action.split(" ")
    at = rng.randrange(len(words))
    before, word, after = words[:at], words[at], words[at + 1 :]
    cut = rng.randrange(len(word))
    used = mistakes.prepositions
    preposition = rng.choice(mistakes.misused)
    verb = rng.choice([verb for verb in mistakes.verbs if verb != words[0]])
    misplaced = [preposition if word in used else word for word in words]
    broken = [
        [*before, word[:cut], *after],  # half a word
        [*before, *after],  # a word missing
        [*before, word, word, *after],  # a word doubled
        [*before, word[:cut] + rng.choice("aeiorstn") + word[cut:], *after],  # a typo
        [verb, *words[1:]],
        misplaced if misplaced != words else [*words, preposition],
        [words[0], "the", *words[1:]],
        rng.sample(words, len(words)),
        ["I", *words],
        [*words, "and", *words],
        [words[0]],
        [],
    ]
    return " ".join(rng.choice(broken)).strip()


def choose(kind: Kind, view: View, mistakes: Mistakes, rng: Random, *, gone_wrong: bool = False) -> str:
    """The action of one step of a scripted policy.

    Args:
        gone_wrong: A `fluent_wrong` or `unfinished_wrong` episode has passed its turning point.
    """
    match kind:
        case "demonstration":
            return view.right
        case "random":
            return rng.choice(view.valid)
        case "malformed":
            if rng.random() >= 0.7:
                return view.right
            return corrupt(rng.choice([view.right, rng.choice(view.valid)]), mistakes, rng)
        case "fluent_wrong" | "unfinished_wrong":
            return mistakes.wrong(view, rng) if gone_wrong and rng.random() < 0.8 else view.right
        case "noisy" | "unfinished":
            stray: Kind = rng.choice(["random", "malformed", "fluent_wrong"])
            return choose(stray, view, mistakes, rng, gone_wrong=True) if rng.random() < 0.3 else view.right
        case "mixture":
            return choose(rng.choice(KINDS[:5]), view, mistakes, rng, gone_wrong=True)


def play_scripted(
    kind: Kind,
    environment: TextGame,
    task: Task,
    rng: Random,
    *,
    create_oracle: CreateOracle,
    mistakes: Mistakes,
    words: Sequence[str],
) -> tuple[list[Step], bool]:
    """Play one episode with a scripted policy and return its steps and whether it succeeded.

    Actions are checked as a policy's are: a refused one costs a step of the policy, of which there are
    `environment.max_steps`, but no real step.
    """
    oracle = create_oracle(task, rng)
    turn = min(rng.randrange(6), rng.randrange(6))
    seen, steps = [environment.reset(task)], list[Step]()
    while True:
        valid = environment.valid_actions()
        view = View(seen, valid, oracle(seen, valid), words)
        action = choose(kind, view, mistakes, rng, gone_wrong=len(steps) >= turn)
        step, success = play_action(environment, action, seen[-1], last=len(steps) + 1 >= environment.max_steps)
        steps.append(step)
        seen.append(step.next_observation)
        if success and kind in ("unfinished", "unfinished_wrong") and len(steps) > 1:
            return [*steps[:-2], replace(steps[-2], truncated=True)], False
        if step.terminated or step.truncated:
            return steps, success


def scripted_trajectories(
    tasks: Sequence[Task],
    environment: TextGame,
    *,
    episodes: Mapping[str, int],
    seed: int,
    run: str,
    create_oracle: CreateOracle,
    mistakes: Mistakes,
    words: Sequence[str],
) -> Iterator[Trajectory]:
    """`episodes[kind]` trajectories of each `Kind`, the tasks taken in turn; played while they are iterated over.

    Raises `ConfigurationError`, before anything is played, for an unknown kind, no task, or one of an evaluation split.
    """
    for kind in episodes:
        if kind not in KINDS:
            raise ConfigurationError.unknown("kind", kind, KINDS)
    for task in tasks:
        if task.split != "train":
            raise ConfigurationError(f"task {task.id} is a {task.split} task: offline trajectories of it would leak it")
    if not tasks:
        raise ConfigurationError("scripted_trajectories needs at least one task of the train split, got none")

    def play() -> Iterator[Trajectory]:
        played = dict.fromkeys((task.id for task in tasks), 0)
        for kind, wanted in episodes.items():
            order = Random(f"{seed} {kind}").sample(tasks, len(tasks))
            for number in range(wanted):
                task, rng = order[number % len(order)], Random(f"{seed} {kind} {number}")
                steps, success = play_scripted(
                    cast(Kind, kind),
                    environment,
                    task,
                    rng,
                    create_oracle=create_oracle,
                    mistakes=mistakes,
                    words=words,
                )
                yield Trajectory(task=task, steps=steps, success=success, run=run, rollout_index=played[task.id])
                played[task.id] += 1

    return play()
