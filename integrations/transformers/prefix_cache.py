"""The conversations of an engine: their tokens as sampled, with keys and values."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dreamgym_lg.errors import ContextExceeded
from dreamgym_lg.integrations.transformers.machine import free_memory, give_back_memory
from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.integrations.transformers.tool_format import render

BLOCK = 32
"""Tokens of a shared block."""

TOKENS_ONLY = 10_000
"""Number of conversations whose tokens alone are remembered."""

_Key = tuple[Any, ...]


def cache_budget(device: torch.device) -> int:
    """Bytes for conversations: of the free memory a third on a GPU, else a sixth. A batch takes up to 1.5 times as many."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] // 3)
    give_back_memory()
    return free_memory() // 6


@dataclass(slots=True)
class KeyValues:
    """Keys and values of a conversation, with room to write further ones in place."""

    prompt: tuple[torch.Tensor, ...]
    """Blocks of its first tokens, shared with other conversations: [layers, 2, heads, `BLOCK`, head size] each."""
    buffer: torch.Tensor
    """Keys and values of the tokens behind, with room: [layers, 2, heads, tokens and room, head size]."""
    filled: int
    """Number of tokens, those of the prompt included."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that holds memory."""
        return *self.prompt, self.buffer

    @property
    def prompt_length(self) -> int:
        """Number of tokens in the blocks, behind which the buffer begins."""
        return BLOCK * len(self.prompt)

    def copy_to(self, target: torch.Tensor, start: int) -> None:
        """Copy those from token `start` on into `target`, [layers, 2, heads, tokens, head size]."""
        end = start + target.shape[-2]
        for number, block in enumerate(self.prompt[start // BLOCK :], start=start // BLOCK):
            first, last = max(start, number * BLOCK), min(end, (number + 1) * BLOCK)
            if first < last:
                target[..., first - start : last - start, :] = block[..., first - number * BLOCK : last - number * BLOCK, :]
        if end > (first := max(start, self.prompt_length)):
            target[..., first - start :, :] = self.buffer[..., first - self.prompt_length : end - self.prompt_length, :]

    def extended(self, new: torch.Tensor, filled: int) -> "KeyValues":
        """The first `filled` tokens' and new ones behind. In place, unless another conversation went on from there."""
        start, total = self.prompt_length, filled + new.shape[-2]
        if self.filled == filled and self.buffer.shape[-2] >= total - start:
            extended = self
        else:
            room = max((total - start) // 4, 16)  # not as much again, as lists grow: that would be most of the memory
            buffer = new.new_empty(*new.shape[:3], total - start + room, new.shape[-1])
            buffer[..., : filled - start, :] = self.buffer[..., : filled - start, :]
            extended = KeyValues(self.prompt, buffer, total)
        extended.buffer[..., filled - start : total - start, :] = new
        extended.filled = total
        return extended


@dataclass(slots=True, frozen=True)
class Prefix:
    """A conversation so far: its rendered text, its tokens, their keys and values."""

    text: str = ""
    ids: Sequence[int] = ()
    cached: KeyValues | None = None
    """Shared with the conversations that this one went on from and into; None: forgotten."""
    known: int = 0
    """Tokens with keys and values; the last sampled one has none yet."""


class PrefixCache:
    """Conversations by owner, roles and contents. Not thread-safe: the engine uses it between batches.

    Args: `budget`, bytes of keys and values over all conversations; the least recently used go first.
    """

    def __init__(self, budget: int = 0) -> None:
        self.budget = budget
        self.prefixes: OrderedDict[_Key, Prefix] = OrderedDict()
        self.cached_bytes = 0
        """Size of all buffers, their room to grow included; a shared one counts once."""
        self._sharing: Counter[int] = Counter()
        """Number of conversations that use a tensor, by its id."""
        self._tokens_only: OrderedDict[_Key, Prefix] = OrderedDict()

    def find(self, request: Request, text: str) -> Prefix:
        """The conversation up to its last sampled reply. Empty where `text` does not begin with one.

        A later reply may be another than was sampled: a dream corrects what its experience model gets wrong.
        """
        key = _key(request.owner, request.conversation)
        replies = [place for place, (role, *_) in enumerate(key[1:], start=1) if role == "assistant"]
        for end in reversed(replies):
            prefix = self.prefixes.get(key[: end + 1]) or self._tokens_only.get(key[: end + 1])
            if prefix is not None and text.startswith(prefix.text):
                return prefix
        return Prefix()

    def encode(self, tokenizer: PreTrainedTokenizerBase, request: Request, max_tokens: int) -> tuple[str, list[int], Prefix]:
        """The conversation as text and tokens, and its known beginning. Tokens of earlier replies are those that were sampled.

        Raises `ContextExceeded` if it may grow beyond `max_tokens`.
        """
        text = render(tokenizer, request)
        prefix = self.find(request, text)
        ids = [*prefix.ids, *tokenizer(text[len(prefix.text) :], add_special_tokens=False)["input_ids"]]
        check_length(request, ids, max_tokens)
        return text, ids, prefix

    def keep_reply(
        self, tokenizer: PreTrainedTokenizerBase, request: Request, prompt: str, generated: Generated, ends: Collection[int]
    ) -> Generated:
        """As `keep`, without keys and values, which a server has. Returns the reply with its text and finish reason.

        Args:
            prompt: The rendered prompt.
            generated: The tokens of the reply, its text still missing.
            ends: The tokens that end a reply.
        """
        sampled = generated.sampled_ids
        reply, cut = request.reply(tokenizer, sampled)
        ended = sampled[-1] in ends
        end = tokenizer.decode(sampled[-1:]) if ended else ""
        key = self._advance(request, reply)
        self._remember(key, prompt + reply[len(request.forced) :] + end, generated.prompt_ids + sampled)
        return replace(generated, text=reply, finish_reason="stop" if ended or cut else generated.finish_reason)

    def keep(
        self,
        request: Request,
        before: Prefix,
        *,
        reply: str,
        text: str,
        ids: list[int],
        new: torch.Tensor,
    ) -> None:
        """Remember an answered conversation and its keys and values; forget the oldest beyond the budget.

        Args:
            before: Its prefix before this reply.
            reply: The text that a template makes of the reply.
            text: The whole conversation, rendered. Special tokens sampled inside the reply are in `ids` alone.
            ids: Its tokens.
            new: Keys and values of the tokens after it, [layers, 2, heads, tokens, head size].
        """
        key = self._advance(request, reply)
        self._forget(key)
        cached = (before.cached or KeyValues((), new[..., :0, :], 0)).extended(new, before.known)
        self.prefixes[key] = Prefix(text, ids, cached, cached.filled)
        for tensor in cached.tensors:
            self._sharing[id(tensor)] += 1
            if self._sharing[id(tensor)] == 1:
                self.cached_bytes += tensor.nbytes
        while self.cached_bytes > self.budget:
            self._drop_keys(next(iter(self.prefixes)))

    def clear(self) -> None:
        """Forget all keys and values, not the tokens."""
        for key in list(self.prefixes):
            self._drop_keys(key)

    def _advance(self, request: Request, reply: str) -> _Key:
        """The key of the conversation with this reply. Forgets the one before it, if the owner goes on from here."""
        if request.owner is not None:  # what has no owner may be continued in several ways
            self._forget(_key(request.owner, request.conversation))
        return _key(request.owner, [*request.conversation, {"role": "assistant", "content": reply}])

    def _forget(self, key: _Key) -> None:
        self._tokens_only.pop(key, None)
        if (prefix := self.prefixes.pop(key, None)) is None or prefix.cached is None:
            return
        for tensor in prefix.cached.tensors:
            self._sharing[id(tensor)] -= 1
            if not self._sharing[id(tensor)]:
                del self._sharing[id(tensor)]
                self.cached_bytes -= tensor.nbytes

    def _drop_keys(self, key: _Key) -> None:
        """Keep the tokens alone; encoding the text again could give others, and split the segment."""
        prefix = self.prefixes[key]
        self._forget(key)
        self._remember(key, prefix.text, prefix.ids)

    def _remember(self, key: _Key, text: str, ids: Sequence[int]) -> None:
        self._tokens_only.pop(key, None)
        self._tokens_only[key] = Prefix(text, ids)
        if len(self._tokens_only) > TOKENS_ONLY:
            self._tokens_only.popitem(last=False)


class SharedPromptBlocks:
    """Keys and values of prompts, by their tokens: instructions, tools, a group's first message.

    In blocks of `BLOCK` tokens, each known by all tokens up to its end. Not thread-safe, as `PrefixCache`.

    Args: `budget`, in bytes.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._blocks: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self.bytes = 0

    def find(self, ids: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The known blocks that these tokens begin with, [layers, 2, heads, `BLOCK`, head size] each."""
        blocks = list[torch.Tensor]()
        for _, name in _named_blocks(ids):
            if (block := self._blocks.get(name)) is None:
                break
            self._blocks.move_to_end(name)
            blocks.append(block)
        return tuple(blocks)

    def keep(self, ids: Sequence[int], buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Remember the whole blocks of these tokens, and return them.

        Args: `buffer`, their keys and values, [layers, 2, heads, tokens or more, head size].
        """
        blocks = list[torch.Tensor]()
        for end, name in _named_blocks(ids):
            if name not in self._blocks:
                block = self._blocks[name] = buffer[..., end - BLOCK : end, :].clone()
                self.bytes += block.nbytes
            blocks.append(self._blocks[name])
        while self.bytes > self.budget:
            self.bytes -= self._blocks.popitem(last=False)[1].nbytes
        return tuple(blocks)

    def clear(self) -> None:
        self._blocks.clear()
        self.bytes = 0


def _named_blocks(ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Each whole block's end and name, a hash of all tokens up to there."""
    digest = blake2b(digest_size=16)
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        digest.update(array("q", ids[end - BLOCK : end]).tobytes())
        yield end, digest.digest()


def check_length(request: Request, ids: Sequence[int], max_tokens: int) -> None:
    """Raise `ContextExceeded` if these tokens and the longest reply exceed the model's context."""
    if len(ids) + request.max_new_tokens > max_tokens:
        raise ContextExceeded(
            f"the conversation has {len(ids)} tokens and may grow by {request.max_new_tokens}; the model takes "
            f"{max_tokens}: shorten the episode, the observations or max_new_tokens"
        )


def _key(owner: int | None, conversation: Sequence[dict[str, Any]]) -> _Key:
    """Names a conversation up to its last reply."""
    end = max((i + 1 for i, message in enumerate(conversation) if message["role"] == "assistant"), default=0)
    return owner, *((message["role"], message.get("sampled") or str(message["content"])) for message in conversation[:end])
