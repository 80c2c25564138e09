"""The names in the small base's conversations: English words, invented words and ids, and what a conversation is."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnprstvwz"


class Conversation(NamedTuple):
    """Messages with `role` and `content`, the assistant's with `tool_calls`, and the tools that were offered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@lru_cache(1)
def known_words() -> list[str]:
    """English words, none of them part of a name of TextWorld-Express or ALFWorld."""
    return Path(__file__).with_name("words.txt").read_text().split()


def _stands_in(name: str, other: str) -> bool:
    """Whether one would be found when looking for it in the other: whole words of a name, any part of an id."""
    return name in other if any(map(str.isdigit, name + other)) else f" {name} " in f" {other} "


class Names:
    """Draws the names of one conversation, often from few syllables: names of like pieces are what copying mistakes.

    Args:
        rng: The conversation's own.
        words: The words to draw from; None for `known_words()`.
    """

    def __init__(self, rng: Random, words: list[str] | None = None) -> None:
        self.rng, self.words = rng, words or known_words()
        few = rng.random() < 0.35
        self.syllables = [self._syllable() for _ in range(rng.randint(4, 9))] if few else []
        self.known_share = rng.choice([0.0, 0.3, 0.6, 0.9])
        self.alike_share = rng.choice([0.0, 0.0, 0.3, 0.7])
        self.pair_share = rng.choice([0.0, 0.2, 0.5, 0.9])

    def word(self) -> str:
        if self.rng.random() < self.known_share:
            return self.rng.choice(self.words)
        pieces = [
            self.rng.choice(self.syllables) if self.syllables else self._syllable() for _ in range(self.rng.randint(2, 3))
        ]
        return "".join(pieces)

    def name(self) -> str:
        """One word, or two."""
        return f"{self.word()} {self.word()}" if self.rng.random() < self.pair_share else self.word()

    def id(self) -> str:
        """Letters and digits, like `W-20418`, `ord_7f3a`, `#5512`, `48-kz-901`."""
        rng = self.rng
        head = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(1, 3)))
        head = rng.choice([head, head.upper(), head.upper(), self.rng.choice(self.words)])
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 7)))
        mixed = "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(4, 7)))
        shapes = [
            f"{head}-{digits}",
            f"{head}_{mixed}",
            f"{head}{digits}",
            digits,
            f"#{digits}",
            f"{head}-{digits[:2]}-{mixed}",
            mixed,
        ]
        return rng.choice(shapes)

    def several(self, count: int, draw: Callable[[], str] | None = None) -> list[str]:
        """So many different ones, none of which stands whole in another. In some conversations they are easily mistaken."""
        found: list[str] = []
        for _ in range(50 * count):
            alike = found and self.rng.random() < self.alike_share
            new = self.alike(self.rng.choice(found)) if alike else (draw or self.name)()
            if len(found) < count and not any(_stands_in(new, old) or _stands_in(old, new) for old in found):
                found.append(new)
        return found if len(found) == count else self.several(count, self.id)

    def alike(self, name: str) -> str:
        """A name that begins or ends like this one, such as another digit in an id or a further syllable."""
        rng = self.rng
        if digits := [at for at, character in enumerate(name) if character.isdigit()]:
            at = rng.choice(digits)
            return name[:at] + rng.choice("0123456789") + name[at + 1 :]
        first, *rest = name.split(" ")
        if rest and rng.random() < 0.5:
            return rng.choice([f"{first} {self.word()}", f"{self.word()} {rest[-1]}"])
        half, syllable = len(first) // 2, self._syllable()
        return " ".join(
            [rng.choice([first + syllable, syllable + first, first[:half] + syllable, syllable + first[half:]]), *rest]
        )

    def _syllable(self) -> str:
        end = self.rng.choice(["", "", *CONSONANTS[:6]])
        return self.rng.choice(CONSONANTS) + self.rng.choice(VOWELS) + end
