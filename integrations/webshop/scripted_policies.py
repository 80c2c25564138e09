"""Scripted policies for WebShop: its demonstrator, the mistakes one can make there, and two baselines without a model."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from dreamgym_lg.environment import play_action
from dreamgym_lg.integrations.text_games import scripted_policies
from dreamgym_lg.integrations.text_games.scripted_policies import Mistakes, Oracle, View
from dreamgym_lg.integrations.webshop.data import Goal
from dreamgym_lg.integrations.webshop.environment import WebShopEnvironment
from dreamgym_lg.integrations.webshop.pages import PER_PAGE
from dreamgym_lg.types import Step, Task, Trajectory

_ASIN = re.compile(r"click\[b0[a-z0-9]{8}\]")
_LIMIT = re.compile(r", and price lower than ([\d.]+) dollars$")
_PRICE = re.compile(r"\$([\d.]+)")
_BUY = "click[buy now]"

Baseline = Callable[[str, Sequence[str], Sequence[str]], str]
"""A policy without a model: `(instruction, observations, clickables) -> action`."""


def search_words(instruction: str) -> str:
    """What of an instruction to search for: all but `Find me` and the price."""
    return _LIMIT.sub("", instruction).removeprefix("Find me ")


def create_oracle(environment: WebShopEnvironment, task: Task, rng: Random) -> Oracle:
    """The demonstrator of `task`: it finds the product that the instruction was written for, chooses its options and buys it.

    It searches for what the instruction says, as a policy can, and turns the pages; where that does not find the product, it
    searches for its title. It finds back from wherever a stray action led. 4 in 100 of its purchases pay less than 1, since
    the official reward does not know some of its own options.
    """

    def right(seen: Sequence[str], valid: Sequence[str]) -> str:
        visit = environment.visit
        assert visit is not None, "the oracle is asked in an episode"
        target, open_target = visit.target, f"click[{visit.target.asin.lower()}]"
        if open_target in valid:
            return open_target
        if visit.product == target:
            chosen = visit.options.values()
            missing = [f"click[{value}]" for value in _values(visit.goal) if value not in chosen]
            action = next((click for click in missing if click in valid), _BUY)
            return action if visit.kind == "item" else "click[< prev]"
        among = target in visit.found
        if visit.kind == "results" and among and visit.number <= visit.found.index(target) // PER_PAGE:
            return "click[next >]"
        return f"search[{search_words(task.instruction) if among or not visit.found else target.title}]"

    return right


def _values(goal: Goal) -> list[str]:
    return [option if isinstance(option, str) else option[1] for option in goal.options]


def _wrong(view: View, rng: Random) -> str:
    """Well-formed but not what is needed: another product or option, bought too early, other words, back and forth."""
    others = [action for action in view.valid if action != view.right] or [_BUY]
    products = [action for action in others if _ASIN.fullmatch(action)]
    words = view.right.removeprefix("search[").removesuffix("]").split() if view.right.startswith("search[") else []
    searches = [f"search[{' '.join(rng.sample(view.words, min(3, len(view.words))))}]"]
    if len(words) > 2:
        searches.append(f"search[{' '.join(rng.sample(words, 2))}]")
    unseen = [f"click[{rng.choice(view.words)}]", "click[search]"]
    buys = [_BUY] if _BUY in others else []
    groups = [*[products] * 3, *[buys] * 3, *[others] * 3, searches, unseen]
    return rng.choice(rng.choice([group for group in groups if group]))


MISTAKES = Mistakes(
    wrong=_wrong,
    verbs=("buy[it]", "open[it]", "click", "search", "choose[size]", "think[the price is fine]"),
    prepositions=("with", "and"),
    misused=("for", "of", "please"),
)


def scripted_trajectories(
    tasks: Sequence[Task], environment: WebShopEnvironment, *, episodes: Mapping[str, int], seed: int, run: str = "offline"
) -> Iterator[Trajectory]:
    """`episodes[kind]` trajectories of each `Kind`, the tasks taken in turn; the same arguments give the same ones.

    They are played while they are iterated over.
    Raises `ConfigurationError`, before anything is played, for an unknown kind, no task, or one of an evaluation split.
    """
    words = sorted({word for task in tasks for word in re.findall(r"[a-z]{4,}", search_words(task.instruction))})
    return scripted_policies.scripted_trajectories(
        tasks,
        environment,
        episodes=episodes,
        seed=seed,
        run=run,
        create_oracle=lambda task, rng: create_oracle(environment, task, rng),
        mistakes=MISTAKES,
        words=words or ["lamp"],
    )


# --- Baselines -------------------------------------------------------------------------------------------------------


def buy_first(instruction: str, observations: Sequence[str], clickables: Sequence[str]) -> str:
    """Search for the whole instruction, open the first product and buy it without choosing options."""
    if "search" in clickables:
        return f"search[{instruction}]"
    first = next((what for what in clickables if _ASIN.fullmatch(f"click[{what}]")), None)
    return f"click[{first}]" if first else _BUY


def rule_based(instruction: str, observations: Sequence[str], clickables: Sequence[str]) -> str:
    """Search for what is asked, open the first product within the price limit, choose the options that are asked for, buy."""
    if "search" in clickables:
        return f"search[{search_words(instruction)}]"
    page = observations[-1]
    if "buy now" not in clickables:
        limit = float(found[1]) if (found := _LIMIT.search(instruction)) else float("inf")
        products = [what for what in clickables if _ASIN.fullmatch(f"click[{what}]")]
        cheap = [asin for asin in products if _lowest_price(page, asin) <= limit]
        return f"click[{[*cheap, *products, 'back to search'][0]}]"
    pages = sum(observation == page for observation in observations)
    asked = [value for value in clickables[6:] if re.search(rf": {re.escape(value)}(,|$)", instruction)]
    return f"click[{asked[pages - 1]}]" if pages <= len(asked) else _BUY


def _lowest_price(page: str, asin: str) -> float:
    """Of a product on a page of results; infinite where none is shown."""
    shown = page.partition(asin.upper())[2].split(" [SEP] ")[:3]
    found = _PRICE.match(shown[2]) if len(shown) == 3 else None
    return float(found[1]) if found else float("inf")


def play_baseline(baseline: Baseline, environment: WebShopEnvironment, task: Task) -> Trajectory:
    """One real episode of a baseline."""
    seen, steps, success = [environment.reset(task)], list[Step](), False
    while environment.visit is not None:
        action = baseline(task.instruction, seen, environment.visit.page.clickables)
        step, success = play_action(environment, action, seen[-1], last=len(steps) + 1 >= environment.max_steps)
        steps.append(step)
        seen.append(step.next_observation)
        if step.terminated or step.truncated:
            break
    return Trajectory(task=task, steps=steps, source="real", success=success, run="baseline")
