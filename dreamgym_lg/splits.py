"""Validation and test splits by entity."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from random import Random
from unicodedata import category

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.tasks import first_observation
from dreamgym_lg.types import Split, Task

COMMON = 0.1
"""Share of the tasks above which an entity ties nothing. Many tasks name the same city or brand."""
_MIN_COMMON = 5
"""In so many tasks no entity is common, however few tasks there are."""

_WORD = re.compile(r"\w(?:(?:[\w.@/:+-]|,(?=\d{3}(?!\d)))*\w)?")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_PHRASE = re.compile(r"(?<![\w@./-])[^\W\d_][\w-]*(?: [^\W\d_][\w-]*)*(?![\w@/-]|\.\w)")
_QUOTE = re.compile(r'["“]([^"“”\n]{2,60})["”]')
_DATE = re.compile(r"(?:19|20)\d\d(?:0\d|1[0-2])[0-3]\d")
"""A date as `_normal` writes it."""
_SENTENCE_START = re.compile(r"(?:^|[.!?:;\n])[\s\"'“‘(*-]*$")


def split_tasks(
    tasks: Sequence[Task],
    *,
    by: Callable[[Task], Iterable[Hashable]] | None = None,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
) -> list[Task]:
    """The tasks with new splits, `train`, `validation` and `test`, that share no entity.

    Tasks that share one, directly or through others, are drawn together, until a split has about its share. The same tasks and
    seed give the same splits, in the order of the tasks.

    Args:
        by: The entities of a task, each of which ties. Default: `entities` of its first observation but for those that many
            tasks name, and its words. Give your own where metadata hold the ids: `lambda task: [task.metadata["customer"]]`.
        validation: Share of the tasks, at least 0 and below 1; 0 makes no such split.
        test: The same of the split `test`. Both together are below 1.

    Raises `ConfigurationError` for shares out of range, for what `by` must not give, and where a split would be empty.
    """
    shares: dict[Split, float] = {"test": test, "validation": validation}
    for name, share in {"validation": validation, "test": test}.items():
        if not 0 <= share <= 1:
            raise ConfigurationError(f"{name}={share!r}: give a share of the tasks between 0 and 1")
    if validation + test >= 1:
        raise ConfigurationError(f"validation={validation:g} and test={test:g} leave no task to train on")
    groups = tied_groups(_tying_keys(tasks, by))
    left, splits = Random(seed).sample(groups, len(groups)), dict[int, Split]()
    for split, share in shares.items():
        splits |= dict.fromkeys(_take(left, share * len(tasks)) if share else (), split)
    empty = [split for split, share in shares.items() if share and split not in splits.values()]
    if empty or not left:
        raise ConfigurationError(
            f"validation={validation:g}, test={test:g}: no task is left for the split {[*empty, 'train'][0]!r}. The "
            f"{len(tasks)} tasks are {len(groups)} groups that share an entity, the largest of "
            f"{max(map(len, groups), default=0)}: give more tasks, other shares, or by="
        )
    return [replace(task, split=splits.get(number, "train")) for number, task in enumerate(tasks)]


def entities(text: str, small: Collection[str] = ()) -> frozenset[str]:
    """The ids, amounts, email addresses, names and quotes of a text.

    In lower case, and in one form however they are written: `#A-17` and `a17`, `$1,000.00` and `1000`. A number of one or two
    digits is a count, unless decimals or a currency sign say otherwise. Names are runs of capitalised words (Anna Berg); one
    alone is none at the beginning of a sentence, nor as an abbreviation of up to three capitals.

    Args: `small`, the words that texts like this one also write without a capital: no name is made of them alone.
    """
    numbered = (match for match in _WORD.finditer(text) if re.search(r"[\d@]", match.group()))
    ids = {_normal(match.group()) for match in numbered if not _is_count(match)}
    return frozenset(ids.union(_names(text, small), (" ".join(words(quote)) for quote in _QUOTE.findall(text))) - {""})


def words(text: str) -> list[str]:
    """The words of a text, in the form that `entities` gives them."""
    return [_normal(word) for word in _WORD.findall(text)]


def common_entities(named: Sequence[Iterable[Hashable]], share: float = COMMON) -> frozenset[Hashable]:
    """The entities that more than this share of the tasks have. Args: `named`, those of each task."""
    counts = Counter(entity for each in named for entity in set(each))
    return frozenset(entity for entity, number in counts.items() if number > max(_MIN_COMMON, share * len(named)))


def sharing(tasks: Sequence[Task], others: Sequence[Task]) -> dict[str, str]:
    """The text that each task shares with the others: an uncommon entity, or all words.

    By the ids of tasks that share something. A date, or a name of one word (a city, a surname), is shared by tasks about
    different things and does not count. A seed's world names nothing.
    """
    tasks, others = ([task for task in each if task.seed is None] for each in (tasks, others))
    keys = _tying_keys([*tasks, *others])
    keys_of_others = frozenset(key for own in keys[len(tasks) :] for key in own if _identifies(key))
    shared = {task.id: own & keys_of_others for task, own in zip(tasks, keys, strict=False)}
    return {id: min(" ".join(key) if isinstance(key, tuple) else str(key) for key in own) for id, own in shared.items() if own}


def _identifies(key: Hashable) -> bool:
    return not isinstance(key, str) or (not _DATE.fullmatch(key) and re.search(r"[\d@ ]", key) is not None)


def _normal(word: str) -> str:
    """A word in lower case; ids and numbers in one form."""
    if _NUMBER.fullmatch(word):
        number = word.replace(",", "")
        return number.rstrip("0").rstrip(".") if "." in number else number
    return re.sub(r"[\W_]", "", word.lower()) if re.search(r"\d", word) and "@" not in word else word.lower()


def _is_count(match: re.Match[str]) -> bool:
    before = match.string[max(0, match.start() - 1) : match.start()]
    return len(match.group()) < 3 and match.group().isdigit() and not (before and category(before) == "Sc")


def _names(text: str, small: Collection[str]) -> Iterator[str]:
    for phrase in _PHRASE.finditer(text):
        first, *rest = phrase.group().split(" ")
        runs = _capitalised([first, *rest])
        # at the beginning of a sentence the first word's capital says nothing
        if _SENTENCE_START.search(text, max(0, phrase.start() - 9), phrase.start()):
            runs = [*(run for run in runs if run != [first] and first.lower() not in small), *_capitalised(rest)]
        for run in runs:
            if not all(word.lower() in small or (len(word) < 4 and word.isupper()) for word in run):
                yield " ".join(map(_normal, run))


def _capitalised(phrase: Sequence[str]) -> list[list[str]]:
    """The runs of words with a capital and without a digit."""
    runs = groupby(phrase, lambda word: word[0].isupper() and not re.search(r"\d", word))
    return [list(run) for capital, run in runs if capital]


# --- groups -----------------------------------------------------------------------------------------------------------


def _tying_keys(tasks: Sequence[Task], by: Callable[[Task], Iterable[Hashable]] | None = None) -> list[frozenset[Hashable]]:
    """Keys that tie each task to others. They are those of `by`, else uncommon entities and its words with the user's goal."""
    if by is not None:
        return [_keys(by, task) for task in tasks]
    texts = [first_observation(task) for task in tasks]
    small = {word for text in texts for word in _WORD.findall(text) if word.islower()}
    named = [entities(text, small) for text in texts]
    common = common_entities(named)
    said = [tuple(words(f"{text} {task.goal.get('goal', '')}")) for text, task in zip(texts, tasks, strict=True)]
    return [keys - common | {own} for keys, own in zip(named, said, strict=True)]


def _keys(by: Callable[[Task], Iterable[Hashable]], task: Task) -> frozenset[Hashable]:
    keys = by(task)
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise ConfigurationError(f"by= gives {keys!r} for the task {task.id!r}: let it give a list of keys, such as [{keys!r}]")
    return frozenset(keys)


def tied_groups(keys: Sequence[frozenset[Hashable]]) -> list[list[int]]:
    """The numbers of the tasks that keys tie together, directly or through others."""
    parents, first = list(range(len(keys))), dict[Hashable, int]()

    def root(number: int) -> int:
        while parents[number] != number:
            number = parents[number]
        return number

    for number, own in enumerate(keys):
        for key in own:
            one, other = sorted((root(number), root(first.setdefault(key, number))))
            parents[other] = one
    groups = defaultdict[int, list[int]](list)
    for number in range(len(keys)):
        groups[root(number)].append(number)
    return list(groups.values())


def _take(groups: list[list[int]], size: float) -> list[int]:
    """Tasks of whole groups, about `size`, taken away from `groups`."""
    taken, number = list[int](), max(1, round(size))
    for group in list(groups):
        if abs(len(taken) + len(group) - number) < abs(len(taken) - number):
            taken += group
            groups.remove(group)
    return taken
