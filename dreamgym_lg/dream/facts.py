"""The ids, amounts and numbers in texts. A message is compared by them."""

import re
from collections.abc import Collection
from itertools import pairwise

from dreamgym_lg.actions import is_answer, parse_action
from dreamgym_lg.splits import entities, words

_WITH_UNIT = re.compile(r"(\d+)[^\W\d_]+")


def message_text(action: str) -> str:
    """The text of a message; any other action as it is."""
    return str(parse_action(action)) if is_answer(action) else action


def facts(*texts: str) -> frozenset[str]:
    """The ids, amounts and addresses in texts: `entities` with a digit or an `@`."""
    return frozenset(each for text in texts for each in entities(text) if any(sign.isdigit() or sign == "@" for sign in each))


def numbers(*texts: str) -> frozenset[str]:
    """The words with a digit in texts, counts too; of `5kg` also the number alone."""
    numbered = frozenset(each for text in texts for each in words(text) if any(map(str.isdigit, each)))
    return numbered.union(map(_number, numbered))


def message_facts(*texts: str) -> frozenset[str]:
    """All facts and numbers of messages. `5 kg` is also `5kg`."""
    pairs = (pair for text in texts for pair in pairwise(words(text)))
    joined = (one + other for one, other in pairs if one.isdigit() and other.isalpha())
    return facts(*texts).union(numbers(*texts), joined)


def new_facts(stated: Collection[str], shown: Collection[str]) -> frozenset[str]:
    """The facts that are not shown. Of a number with its unit, as `2x`, the number is enough."""
    return frozenset(each for each in stated if each not in shown and _number(each) not in shown)


def _number(fact: str) -> str:
    """The number in a fact such as `5kg`; any other fact unchanged."""
    return match[1] if (match := _WITH_UNIT.fullmatch(fact)) else fact
