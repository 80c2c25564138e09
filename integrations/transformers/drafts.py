"""Guesses at what a model says next, so that one forward pass reads several tokens of a reply (speculative decoding).

A guess is what followed the same few tokens before, in whatever the model has read or written: an environment in text repeats
itself. Each token is still sampled from the model's own distribution, and what was guessed behind another one is dropped, so
that a wrong guess costs time and changes no reply (prompt lookup decoding, Saxena 2023; Leviathan et al. 2023 with a draft that
is certain). That is exact up to rounding, which in half precision is enough to change some replies of a seed.
"""

from collections.abc import Collection, Sequence

ORDERS = (8, 4, 2)
"""How many tokens in a row have to be known for a guess at the next one; the longest known row decides."""

REMEMBERED = 500_000
"""Rows of tokens whose next one is remembered, some 70 MB; beyond that all are forgotten."""


class Drafts:
    """The token that last followed each few tokens. Not thread-safe: the engine uses it within a batch.

    Args: `ends`, the tokens that end a reply, behind which nothing is guessed.
    """

    def __init__(self, ends: Collection[int] = ()) -> None:
        self._ends = ends
        self._next: dict[tuple[int, ...], int] = {}

    def learn(self, ids: Sequence[int], start: int) -> None:
        """Remember what follows what in a text. Args: `start`, index of its first token that was not learned yet."""
        if len(self._next) > REMEMBERED:
            self._next.clear()
        for order in ORDERS:
            for place in range(max(start, order), len(ids)):
                self._next[tuple(ids[place - order : place])] = ids[place]

    def guess(self, ids: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that probably come next."""
        tail = list(ids[-ORDERS[0] :])
        given = len(tail)
        while len(tail) < given + most and (token := self._after(tail)) is not None:
            tail.append(token)
            if token in self._ends:
                break
        return tail[given:]

    def _after(self, tail: list[int]) -> int | None:
        for order in ORDERS:
            if (token := self._next.get(tuple(tail[-order:]))) is not None:
                return token
        return None
