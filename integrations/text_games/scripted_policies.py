"""Scripted policies for text games: offline trajectories that teach an experience model what fails, and how.

A model that saw only demonstrations believes that everything succeeds, so most of the kinds below err on purpose.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Literal, NamedTuple, cast, get_args

from dreamgym_lg.environment import play_action
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.game import TextGame
from dreamgym_lg.types import Step, Task, Trajectory

Kind = Literal["demonstration", "noisy", "random", "malformed", "fluent_wrong", "mixture", "unfinished", "unfinished_wrong"]
"""`demonstration`: the shortest solution.  `noisy`: a solution with stray actions in between.  `random`: valid actions.
`malformed`: mostly broken commands.  `fluent_wrong`: right form, wrong object or place, from some point on.
`mixture`: each step is of a kind drawn anew.
`unfinished`, `unfinished_wrong`: as `noisy` and `fluent_wrong`; where one would have succeeded its last step is left out, so
that none of several steps is a success."""
KINDS: tuple[Kind, ...] = get_args(Kind)


class View(NamedTuple):
    """Everything that a scripted policy sees before its next action."""

    seen: Sequence[str]
    """All observations of the episode, oldest first."""
    valid: Sequence[str]
    right: str
    """The oracle's action."""
    words: Sequence[str]
    """Names of things of any world of the game, at least one."""


Oracle = Callable[[Sequence[str], Sequence[str]], str]
"""The demonstrator of one task: `(observations, valid actions) -> right action`."""


class ScriptedPolicies(NamedTuple):
    """How one plays a game, rightly and wrongly."""

    create_oracle: Callable[[Any, Task, Random], Oracle]
    """`(environment, task, rng)`: the demonstrator of a task; where several solutions are right, `rng` chooses."""
    words: Callable[[Sequence[Task]], Sequence[str]]
    """Names of things in the worlds of these tasks, at least one."""
    wrong: Callable[[View, Random], str]
    """A well-formed action that is not what is needed."""
    verbs: Sequence[str]
    """First words of broken commands, words that the game does not know among them."""
    prepositions: Sequence[str]
    """Those of the game."""
    misused: Sequence[str]
    """Others, which take their place."""

    def trajectories(
        self, tasks: Sequence[Task], environment: TextGame, *, episodes: Mapping[str, int], seed: int, run: str = "offline"
    ) -> Iterator[Trajectory]:
        """`episodes[kind]` trajectories of each `Kind`, the tasks taken in turn; played while they are iterated over.

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
        return self._trajectories(tasks, environment, episodes, seed, run)

    def _trajectories(
        self, tasks: Sequence[Task], environment: TextGame, episodes: Mapping[str, int], seed: int, run: str
    ) -> Iterator[Trajectory]:
        played, words = dict.fromkeys((task.id for task in tasks), 0), self.words(tasks)
        for kind, count in episodes.items():
            order = Random(f"{seed} {kind}").sample(tasks, len(tasks))
            for number in range(count):
                task, rng = order[number % len(order)], Random(f"{seed} {kind} {number}")
                steps, success = self.play(cast(Kind, kind), environment, task, rng, words)
                yield Trajectory(task=task, steps=steps, success=success, run=run, rollout_index=played[task.id])
                played[task.id] += 1

    def play(self, kind: Kind, environment: TextGame, task: Task, rng: Random, words: Sequence[str]) -> tuple[list[Step], bool]:
        """The steps of one episode and whether it succeeded.

        Actions are checked as a policy's are: a refused one costs a step of the policy, of which there are
        `environment.max_steps`, but no real step.
        """
        oracle = self.create_oracle(environment, task, rng)
        turn = min(rng.randrange(6), rng.randrange(6))
        seen, steps = [environment.reset(task)], list[Step]()
        while True:
            valid = environment.valid_actions()
            view = View(seen, valid, oracle(seen, valid), words)
            action = self._choose(kind, view, rng, gone_wrong=len(steps) >= turn)
            step, success = play_action(environment, action, seen[-1], last=len(steps) + 1 >= environment.max_steps)
            steps.append(step)
            seen.append(step.next_observation)
            if success and kind in ("unfinished", "unfinished_wrong") and len(steps) > 1:
                return [*steps[:-2], replace(steps[-2], truncated=True)], False
            if step.terminated or step.truncated:
                return steps, success

    def _choose(self, kind: Kind, view: View, rng: Random, *, gone_wrong: bool = True) -> str:
        """The next action. Args: `gone_wrong`, a `fluent_wrong` episode has passed its turning point."""
        match kind:
            case "demonstration":
                return view.right
            case "random":
                return rng.choice(view.valid)
            case "malformed":
                if rng.random() >= 0.7:
                    return view.right
                return self.corrupt(rng.choice([view.right, rng.choice(view.valid)]), rng)
            case "fluent_wrong" | "unfinished_wrong":
                return self.wrong(view, rng) if gone_wrong and rng.random() < 0.8 else view.right
            case "noisy" | "unfinished":
                stray: Kind = rng.choice(["random", "malformed", "fluent_wrong"])
                return self._choose(stray, view, rng) if rng.random() < 0.3 else view.right
            case "mixture":
                return self._choose(rng.choice(KINDS[:5]), view, rng)

    def corrupt(self, action: str, rng: Random) -> str:
        """A broken version of a command, as a weak policy writes them."""
        words = action.split(" ")
        at = rng.randrange(len(words))
        before, word, after = words[:at], words[at], words[at + 1 :]
        cut = rng.randrange(len(word))
        preposition = rng.choice(self.misused)
        verb = rng.choice([verb for verb in self.verbs if verb != words[0]])
        misplaced = [preposition if word in self.prepositions else word for word in words]
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
