"""WebShop's products and goals, from the folder of its `setup.sh` or one packed file."""

import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product as combinations
from pathlib import Path
from random import Random
from threading import RLock
from typing import Any, NamedTuple

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.text_games.game import digest
from dreamgym_lg.integrations.webshop.pages import Product, search_page
from dreamgym_lg.types import Split, Task

_FIX = "name the folder that WebShop's setup.sh fills (items_shuffle.json, items_ins_v2.json) or a packed webshop_small.json.xz"
_NO_LIMIT = 1_000_000.0
"""The price limit of a goal whose product is too dear for one."""
_LOADING = RLock()  # threads that start at once read a catalogue once


class Goal(NamedTuple):
    """A user's request."""

    asin: str
    """The product that the instruction was written for."""
    instruction: str
    attributes: Sequence[str]
    options: Sequence[str | tuple[str, str]]
    """Pairs (name, value); of a human goal, values."""
    price_limit: float
    """In dollars."""


class Catalogue(NamedTuple):
    """Products by asin, in the order of the file, and goals by index."""

    products: Mapping[str, Product]
    goals: Sequence[Goal]


def load_tasks(path: str | Path, *, human: bool = False) -> list[Task]:
    """The goals as tasks, in the order of their indices; `metadata["goal"]` is the index.

    The official splits: goals 0 to 499 are test, 500 to 1,499 validation (the official "dev"), all others training tasks.

    Args:
        path: The folder that the official `setup.sh` fills (its full files come first), or a packed file: xz-compressed JSON
            with the keys `items_shuffle_1000`, `items_ins_v2_1000` and `items_human_ins`.
        human: Instructions that people wrote, in place of those made from products.

    Raises `ConfigurationError` for a file or folder without products or without goals.
    """
    return [_task(index, goal, human) for index, goal in enumerate(load_catalogue(path, human=human).goals)]


def load_catalogue(path: str | Path, *, human: bool = False) -> Catalogue:
    """Products and goals, read once a process. Errors: see `load_tasks`."""
    where = Path(path).expanduser().resolve()
    with _LOADING:
        return _catalogue(where, human)


def goal_of(task: Task, catalogue: Catalogue) -> Goal:
    """The goal of a task of `load_tasks`. Raises `ConfigurationError` for any other task, or other products."""
    index, goals = task.metadata.get("goal"), catalogue.goals
    if task.origin == "synthetic":
        raise ConfigurationError(f"task {task.id} is synthetic: its goal exists in the dream only; take a task of load_tasks")
    if type(index) is not int or not 0 <= index < len(goals) or goals[index].instruction != task.instruction:
        raise ConfigurationError(
            f"task {task.id} has goal {index!r}; these products have goals 0 to {len(goals) - 1}, that one with another "
            "instruction or not at all: take a task of load_tasks of the same data"
        )
    return goals[index]


def _task(index: int, goal: Goal, human: bool) -> Task:
    id = f"{'human' if human else 'goal'}-{index}-{digest(goal.asin, goal.instruction)[:8]}"
    return Task(
        id=id,
        instruction=goal.instruction,
        environment="webshop",
        observation=search_page(goal.instruction).text,
        metadata={"goal": index, "human": human},
        split=_split(index),
    )


def _split(index: int) -> Split:
    return "test" if index < 500 else "validation" if index < 1500 else "train"


# --- Reading ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _catalogue(where: Path, human: bool) -> Catalogue:
    if not where.exists():
        raise ConfigurationError(f"{where} does not exist; {_FIX}")
    try:
        stored, instructions, human_instructions = _read(where)
        rng = Random(0)  # the official engine's generator: the prices are drawn first, then the price limits
        products = {product.asin: product for product in _products(stored, instructions, rng)}
        goals = list(
            _human_goals(products.values(), human_instructions, rng)
            if human
            else _synthetic_goals(products.values(), instructions, rng)
        )
    except ConfigurationError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, EOFError, lzma.LZMAError) as error:
        raise ConfigurationError(f"{where} does not hold WebShop's products ({error!r}); {_FIX}") from error
    if not goals:
        raise ConfigurationError(f"{where} holds no {'human ' if human else ''}goal; {_FIX}")
    Random(233).shuffle(goals)
    return Catalogue(products, goals)


def _read(where: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Products, instructions made from products, and instructions that people wrote."""
    names = ("items_shuffle", "items_ins_v2")
    if where.is_dir():
        ending = "" if (where / "items_shuffle.json").exists() else "_1000"
        files = [where / f"{name}{ending}.json" for name in names]
        if missing := [file.name for file in files if not file.exists()]:
            raise ConfigurationError(f"{where} holds no {missing[0]}; {_FIX}")
        written = where / "items_human_ins.json"
        stored, instructions = (json.loads(file.read_bytes()) for file in files)
        return stored, instructions, json.loads(written.read_bytes()) if written.exists() else {}
    with lzma.open(where) as packed:
        parts = json.load(packed)
    return parts[f"{names[0]}_1000"], parts[f"{names[1]}_1000"], parts["items_human_ins"]


def _products(stored: Iterable[Mapping[str, Any]], instructions: Mapping[str, Any], rng: Random) -> Iterator[Product]:
    seen = {"nan"}
    for item in stored:
        asin = item["asin"]
        if asin in seen or len(asin) > 10:
            continue
        seen.add(asin)
        features = item["small_description"]
        prices = [float(re.sub(r"[^\d.]", "", price)) for price in (item.get("pricing") or "").split("$")[1:]][:2] or [100.0]
        yield Product(
            asin=asin,
            title=item["name"],
            description=item["full_description"],
            features=features if isinstance(features, list) else [features],
            price_tag=" to ".join(f"${price}" for price in prices),
            price=prices[0] if len(prices) == 1 else rng.uniform(*prices),
            options={
                name.lower(): [value["value"].strip().replace("/", " | ").lower() for value in values]
                for name, values in (item["customization_options"] or {}).items()
                if values is not None
            },
            attributes=instructions.get(asin, {}).get("attributes", ["DUMMY_ATTR"]),
            category=item["category"],
            query=item["query"].lower().strip(),
            product_category=item["product_category"],
        )


# --- Goals -----------------------------------------------------------------------------------------------------------


def _synthetic_goals(products: Iterable[Product], instructions: Mapping[str, Any], rng: Random) -> Iterator[Goal]:
    """One goal for each choice of all options of each product that has an instruction."""
    for product in products:
        written = instructions.get(product.asin, {})
        if written.get("instruction") is None:
            continue
        limit, ending = _price_limit(product.price, rng)
        names = sorted(product.options)
        for values in combinations(*(product.options[name] for name in names)):
            options = list(zip(names, values, strict=True))
            chosen = ", and ".join(f"{name}: {value}" for name, value in options)
            text = f"{written['instruction']}{' with ' if chosen else ''}{chosen}{ending}"
            yield Goal(product.asin, text, written["instruction_attributes"], options, limit)


def _human_goals(products: Iterable[Product], written: Mapping[str, Any], rng: Random) -> Iterator[Goal]:
    for product in products:
        for one in written.get(product.asin, ()):
            if attributes := one["instruction_attributes"]:
                limit, ending = _price_limit(product.price, rng)
                text = one["instruction"].strip(".") + ending
                yield Goal(product.asin, text, attributes, one["instruction_options"], limit)


def _price_limit(price: float, rng: Random) -> tuple[float, str]:
    """A goal's limit in dollars and its words. The larger of two of the next four tens above the price."""
    tens = [10.0 * ten for ten in range(1, 100) if 10.0 * ten > price][:4]
    if len(tens) < 2:
        return _NO_LIMIT, ""
    limit = max(rng.sample(tens, 2))
    return limit, f", and price lower than {limit:.2f} dollars"
