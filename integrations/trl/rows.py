"""The rows of supervised training: conversations as tokens, with labels and loss weights."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NotRequired, TypedDict

import torch
from langchain_core.messages import AIMessage, MessageLikeRepresentation, convert_to_messages
from transformers import PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.integrations.transformers.chat_template import ChatTemplate
from dreamgym_lg.integrations.transformers.prefix_cache import PrefixCache
from dreamgym_lg.integrations.transformers.requests import Generated, Request
from dreamgym_lg.integrations.transformers.tool_format import ToolDialect
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder
from dreamgym_lg.types import Segment

Conversation = Sequence[MessageLikeRepresentation]
"""Messages as LangChain takes them: its own, or `{"role", "content"}` with `tool_calls`."""


class TokenizedConversation(TypedDict):
    """A row of supervised training; all lists have the length of the conversation in tokens."""

    input_ids: list[int]
    labels: list[int]
    """-100 where nothing is learned."""
    weights: NotRequired[list[float]]
    """The loss weight of each token; 1 without it."""


def tokenize(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], *, tools: Sequence[Any] = ()
) -> list[TokenizedConversation]:
    """Conversations as training rows, whose labels are the assistant's replies with their ends.

    Each reply stands behind the prompt that a policy would read there, so that any chat template will do. Where a template
    renders a reply otherwise in later prompts (Qwen3 drops what was thought), a conversation is several rows.

    Args: `tools`, that the model is given, as `LocalChatModel.bind_tools` takes them.
    """
    end = reply_end(tokenizer)
    dialect = ToolDialect(tokenizer, {end})
    rows: list[TokenizedConversation] = []
    for conversation in conversations:
        messages, prefixes, recorder = convert_to_messages(conversation), PrefixCache(), TokenRecorder()
        for i, message in enumerate(messages):
            if isinstance(message, AIMessage):
                request = Request((), owner=0, max_new_tokens=0)
                dialect.prepare(request, messages[:i], tools=tools, choice=None, response_format=None)
                reply = replied(tokenizer, prefixes, request, dialect.written(message), end)
                recorder.record(TokenCall(None, reply.prompt_ids, reply.sampled_ids, reply.logprobs, 1.0))
        rows += [labelled(segment) for segment in recorder.segments()]
    return rows


def reply_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a reply. Raises `ConfigurationError` where neither chat template nor tokenizer has one."""
    if (end := ChatTemplate(tokenizer).end) is None:
        raise ConfigurationError("neither the chat template nor the tokenizer ends a reply: set tokenizer.eos_token")
    return int(end)


def replied(tokenizer: PreTrainedTokenizerBase, prefixes: PrefixCache, request: Request, text: str, end: int) -> Generated:
    """The reply of a policy that samples this text, as tokens. Args: `text`, with the request's forced beginning."""
    prompt, ids, _ = prefixes.encode(tokenizer, request, 1 << 30)
    sampled = [*tokenizer(text[len(request.forced) :], add_special_tokens=False)["input_ids"], end]
    kept, _ = prefixes.keep_reply(tokenizer, request, text=prompt, ids=ids, sampled=sampled, ended=True)
    return Generated(kept, ids, sampled, [0.0] * len(sampled), "stop")


def labelled(segment: Segment) -> TokenizedConversation:
    """A row in which what was sampled is learned."""
    ids = list(segment.token_ids)
    return {"input_ids": ids, "labels": [id if own else -100 for id, own in zip(ids, segment.sampled, strict=True)]}


def reply_lengths(row: TokenizedConversation) -> list[int]:
    """The length of each reply in tokens, its end token included."""
    return [len(list(part)) for learned, part in groupby(row["labels"], lambda label: label != -100) if learned]


def weigh_first_lines(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[TokenizedConversation], *, weight: float, lines: int = 2
) -> list[TokenizedConversation]:
    """The rows with `weight` on each reply's first lines and 1 elsewhere; rows with weights keep theirs."""
    breaks = {id for token, id in tokenizer.get_vocab().items() if "\n" in tokenizer.convert_tokens_to_string([token])}
    weighed: list[TokenizedConversation] = []
    for row in rows:
        if "weights" in row:
            weighed.append(row)
            continue
        weights, left, learning = [], 0, False
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            if label != -100 and not learning:
                left = lines
            learning = label != -100
            weights.append(weight if learning and left > 0 else 1.0)
            left -= token in breaks
        weighed.append({**row, "weights": weights})
    return weighed


def padded(length: int, longest: int | None = None) -> int:
    """The length that rows are padded to: a multiple of 64, at most `longest`.

    On a CPU each new length costs the compilation of its kernels (oneDNN).
    """
    rounded = -(-length // 64) * 64
    return rounded if longest is None else max(length, min(rounded, longest))


def split_passes(lengths: Sequence[int], tokens: int, *, shared: int = 0) -> list[list[int]]:
    """Split rows, by their numbers, into passes of rows of like length, the longest first.

    Args:
        lengths: Of the rows, in tokens.
        tokens: The most that a pass computes, padding included; a longer row has one of its own.
        shared: Tokens with which every row begins, computed once in a pass (`shared_prefix`).
    """
    passes: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if passes and shared + (lengths[passes[-1][0]] - shared) * (len(passes[-1]) + 1) <= tokens:
            passes[-1].append(row)
        else:
            passes.append([row])
    return passes


def create_collator(
    pad_id: int, longest: int | None = None
) -> Callable[[list[TokenizedConversation]], dict[str, torch.Tensor]]:
    """A data collator that pads rows on the right, to the length that `padded` says."""

    def collate(rows: list[TokenizedConversation]) -> dict[str, torch.Tensor]:
        def pad(values: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
            length = padded(max(map(len, values)), longest)
            return torch.tensor([[*value, *[fill] * (length - len(value))] for value in values], dtype=dtype)

        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": pad(ids, pad_id, torch.long),
            "attention_mask": pad([[1] * len(row) for row in ids], 0, torch.long),
            "labels": pad([row["labels"] for row in rows], -100, torch.long),
            "weights": pad([row["weights"] for row in rows], 0.0, torch.float),
        }

    return collate
