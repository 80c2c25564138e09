"""Two baselines without a model for WebShop's goals."""

import re
from collections.abc import Callable, Sequence

from dreamgym_lg.environment import record_action
from dreamgym_lg.integrations.webshop.environment import WebShopEnvironment
from dreamgym_lg.integrations.webshop.world import search_words
from dreamgym_lg.types import Step, Task, Trajectory

_ASIN = re.compile(r"click\[b0[a-z0-9]{8}\]")
_BUY = "click[buy now]"
_LIMIT = re.compile(r", and price lower than ([\d.]+) dollars$")
_PRICE = re.compile(r"\$([\d.]+)")

Baseline = Callable[[str, Sequence[str], Sequence[str]], str]
"""A policy without a model: `(instruction, observations, clickables) -> action`."""


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
        last = len(steps) + 1 >= environment.max_steps
        step, success = record_action(action, seen[-1], environment.step(action), last=last)
        steps.append(step)
        seen.append(step.next_observation)
        if step.terminated or step.truncated:
            break
    return Trajectory(task=task, steps=steps, source="real", success=success, run="baseline")
