"""Behaviour policies for TextWorld-Express: offline trajectories that teach an experience model what fails, and how.

A model that saw only demonstrations believes that everything succeeds, so the kinds below err on purpose.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Literal, NamedTuple, cast, get_args

from dreamgym_lg.environment import checked
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.textworld_express.environment import TextWorldExpress
from dreamgym_lg.integrations.textworld_express.text import movable_items
from dreamgym_lg.types import Step, Task, Trajectory

Kind = Literal["demonstration", "noisy", "random", "malformed", "fluent_wrong", "mixture"]
"""`demonstration`: the shortest solution.  `noisy`: a solution with stray actions in between.  `random`: valid actions.
`malformed`: mostly broken commands.  `fluent_wrong`: right form, wrong object or place, from some point on.
`mixture`: each step is of a kind drawn anew."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_VERBS = ("take", "put", "open", "close", "read", "move", "go", "eat", "grab", "use", "look")
_PUT = re.compile(r"You put the (.+) in the (.+)\.")
_PREPOSITIONS = ("on", "into", "to", "at", "under", "with")


class View(NamedTuple):
    """What a behaviour policy chooses from: all observations, the valid actions, the right one, items of any world."""

    seen: Sequence[str]
    valid: Sequence[str]
    right: str
    words: Sequence[str]


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


def oracle(environment: TextWorldExpress, task: Task, rng: Random) -> Callable[[Sequence[str], Sequence[str]], str]:
    """The demonstrator of `task`: `(observations, valid actions) -> right action`.

    `peckingorder` only needs its book. `twc` in one room brings the items, in random order, to where the gold path puts
    them; both find back from any detour. Every other world is played by the gold path, which a detour may break.
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


def corrupt(action: str, rng: Random) -> str:
    """A broken version of a command, as a weak policy utters them."""
    words = action.split(" ")
    at = rng.randrange(len(words))
    before, word, after = words[:at], words[at], words[at + 1 :]
    cut = rng.randrange(len(word))
    preposition, verb = rng.choice(_PREPOSITIONS), rng.choice([verb for verb in _VERBS if verb != words[0]])
    broken = [
        [*before, word[:cut], *after],  # half a word
        [*before, *after],  # a word missing
        [*before, word, word, *after],  # a word doubled
        [*before, word[:cut] + rng.choice("aeiorstn") + word[cut:], *after],  # a typo
        [verb, *words[1:]],
        [preposition if word == "in" else word for word in words] if "in" in words else [*words, preposition],
        [words[0], "the", *words[1:]],
        rng.sample(words, len(words)),
        ["I", *words],
        [*words, "and", *words],
        [words[0]],
        [],
    ]
    return " ".join(rng.choice(broken)).strip()


def choose(kind: Kind, view: View, rng: Random, *, gone_wrong: bool = False) -> str:
    """The action of one step. Args: `gone_wrong`, whether a `fluent_wrong` episode has passed its turning point."""
    match kind:
        case "demonstration":
            return view.right
        case "random":
            return rng.choice(view.valid)
        case "malformed":
            return corrupt(rng.choice([view.right, rng.choice(view.valid)]), rng) if rng.random() < 0.7 else view.right
        case "fluent_wrong":
            return _wrong(view, rng) if gone_wrong and rng.random() < 0.8 else view.right
        case "noisy":
            stray: Kind = rng.choice(["random", "malformed", "fluent_wrong"])
            return choose(stray, view, rng, gone_wrong=True) if rng.random() < 0.3 else view.right
        case "mixture":
            return choose(rng.choice(KINDS[:-1]), view, rng, gone_wrong=True)


def behave(
    kind: Kind, environment: TextWorldExpress, task: Task, rng: Random, *, words: Sequence[str] = ("lamp",)
) -> tuple[list[Step], bool]:
    """Play one episode, checked as in production, and return its steps and whether it succeeded.

    A refused action costs a step of the policy, of which there are `environment.max_steps`, but no real step.
    """
    demonstrator, turn = oracle(environment, task, rng), min(rng.randrange(6), rng.randrange(6))
    seen, steps = [environment.reset(task)], list[Step]()
    while True:
        valid = environment.valid_actions()
        view = View(seen, valid, demonstrator(seen, valid), words)
        action = choose(kind, view, rng, gone_wrong=len(steps) >= turn)
        answer = environment.check_action(action, seen)
        result = environment.step(action) if answer is None else checked(answer)
        truncated = not result.terminated and (result.truncated or len(steps) + 1 >= environment.max_steps)
        steps.append(
            Step(
                observation=seen[-1],
                action=action,
                next_observation=result.observation,
                reward=result.reward,
                terminated=result.terminated,
                truncated=truncated,
                valid=result.info.get("valid", True),
            )
        )
        seen.append(result.observation)
        if result.terminated or truncated:
            return steps, bool(result.info.get("success", False))


def collect(
    tasks: Sequence[Task],
    environment: TextWorldExpress,
    *,
    episodes: Mapping[str, int],
    seed: int,
    run: str = "offline",
) -> Iterator[Trajectory]:
    """`episodes[kind]` trajectories of each `Kind`, the tasks taken in turn.

    The same arguments give the same trajectories, except where gold paths vary (`TextWorldExpress.gold_path`).
    Raises `ConfigurationError`, before anything is played, for an unknown kind or a task of an evaluation split.
    """
    for kind in episodes:
        if kind not in KINDS:
            raise ConfigurationError.unknown("kind", kind, KINDS)
    for task in tasks:
        if task.split != "train":
            raise ConfigurationError(f"task {task.id} is a {task.split} task: collecting on it would leak it")
    if not tasks:
        raise ConfigurationError("collect needs at least one task")
    words = sorted({item for task in tasks for item in movable_items(str(task.metadata["observation"]))}) or ["lamp"]

    def play() -> Iterator[Trajectory]:
        played = dict.fromkeys((task.id for task in tasks), 0)
        for kind, wanted in episodes.items():
            order = Random(f"{seed} {kind}").sample(tasks, len(tasks))
            for number in range(wanted):
                task, rng = order[number % len(order)], Random(f"{seed} {kind} {number}")
                steps, success = behave(cast(Kind, kind), environment, task, rng, words=words)
                yield Trajectory(task=task, steps=steps, success=success, run=run, rollout_index=played[task.id])
                played[task.id] += 1

    return play()
