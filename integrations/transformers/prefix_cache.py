"""What the engine remembers of conversations: their tokens as they were sampled, and the keys and values of those."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dreamgym_lg.integrations.transformers.batch import Request, Row

CACHED_BYTES = 1 << 29
"""Keys and values that a model keeps over all conversations; the least recently used go first and are read anew."""

EMPTIED = 10_000
"""Conversations whose tokens are remembered beyond that."""


@dataclass(slots=True)
class Store:
    """Room for keys and values, [layers, 2, heads, room, head size]: a growing conversation is written once, in place."""

    room: torch.Tensor
    filled: int


@dataclass(slots=True, frozen=True)
class Prefix:
    """A conversation as far as it was read: its rendered text, its tokens, and the keys and values of those."""

    text: str
    ids: list[int]
    store: Store | None = None
    """Shared with the conversations that this one went on from and into; None: forgotten."""
    known: int = 0
    """Tokens with keys and values; the last sampled one has none yet."""
    added: int = 0
    """Bytes that this conversation added to the store."""


class PrefixCache:
    """Conversations by owner, roles and contents. Not thread-safe: the engine uses it between batches."""

    def __init__(self) -> None:
        self.prefixes: OrderedDict[Any, Prefix] = OrderedDict()
        self.cached_bytes = 0
        self._emptied: OrderedDict[Any, Prefix] = OrderedDict()

    def find(self, request: Request, text: str) -> Prefix | None:
        """The conversation up to its last reply, if it was sampled here and `text` begins with it."""
        key = _key(request.owner, request.conversation)
        prefix = self.prefixes.get(key) or self._emptied.get(key)
        return prefix if prefix is not None and text.startswith(prefix.text) else None

    def keep(self, row: Row, reply: str, end: str, known: torch.Tensor, new: torch.Tensor) -> None:
        """Remember a finished conversation and its keys and values; forget the oldest beyond the budget.

        `reply` is the text that a template makes of the reply, `end` that of its end token, if there is one. Special tokens
        sampled inside the reply stay in the ids alone.
        """
        request = row.request
        key = _key(request.owner, [*request.conversation, {"role": "assistant", "content": reply}])
        self._forget(key)
        if request.owner is not None:  # it goes on from here; what has no owner may be continued in several ways
            self._forget(_key(request.owner, request.conversation))
        filled, total = known.shape[-2], known.shape[-2] + new.shape[-2]
        store = row.prefix.store if row.prefix is not None else None
        added = new.nbytes
        if store is None or store.filled != filled or store.room.shape[-2] < total:  # or another has gone on from there
            store = Store(new.new_empty(*new.shape[:3], 2 * total, new.shape[-1]), total)
            store.room[..., :filled, :] = known
            added += known.nbytes
        store.room[..., filled:total, :] = new
        store.filled = total
        text = row.text + reply[len(request.forced) :] + end
        self.prefixes[key] = Prefix(text, row.ids + row.sampled, store, total, added)
        self.cached_bytes += added
        while self.cached_bytes > CACHED_BYTES:
            self._empty(next(iter(self.prefixes)))

    def clear(self) -> None:
        """Forget all keys and values, not the tokens."""
        for key in list(self.prefixes):
            self._empty(key)

    def _forget(self, key: Any) -> None:
        self._emptied.pop(key, None)
        if (prefix := self.prefixes.pop(key, None)) is not None:
            self.cached_bytes -= prefix.added

    def _empty(self, key: Any) -> None:
        """Keep the tokens without keys and values: to encode the text again could give others, and split the segment."""
        prefix = self.prefixes[key]
        self._forget(key)
        self._emptied[key] = Prefix(prefix.text, prefix.ids)
        if len(self._emptied) > EMPTIED:
            self._emptied.popitem(last=False)


def _key(owner: int | None, conversation: Sequence[dict[str, Any]]) -> Any:
    """Names a conversation up to its last reply, which is as far as it has been read before."""
    end = max((i + 1 for i, message in enumerate(conversation) if message["role"] == "assistant"), default=0)
    return owner, *((message["role"], message.get("sampled") or message["content"]) for message in conversation[:end])
