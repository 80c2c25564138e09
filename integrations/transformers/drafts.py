"""Guesses at what a model says next, so that one forward pass reads several tokens of a reply (speculative decoding).

A guess is what followed the same tokens before, in any text that the model has read or written: of a dream, most was there
before. What is sampled is the model's own choice at every place, so a wrong guess costs time and changes no reply
(prompt lookup decoding, Saxena 2023; sampling as in Leviathan et al. 2023, with a draft that is certain).
"""

from collections.abc import Collection, Sequence

ORDERS = (8, 4, 2)
"""How many tokens before a place have to be the same as before; the longest that are known decide."""

REMEMBERED = 500_000
"""Places whose next token is remembered, some 100 MB; then all are forgotten."""


class Drafts:
    """The token that last followed each few tokens. Not thread-safe: the engine uses it within a batch.

    Args: `ends`, the tokens that end a reply, behind which nothing is guessed.
    """

    def __init__(self, ends: Collection[int] = ()) -> None:
        self._ends = ends
        self._next: dict[tuple[int, ...], int] = {}

    def learn(self, ids: Sequence[int], start: int) -> None:
        """Remember what follows what in a text. Args: `start`, of the tokens that are new; those before were learned."""
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
