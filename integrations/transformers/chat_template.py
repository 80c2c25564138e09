"""A chat template as it is. The roles it takes, where its turns end, the conversation it renders."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.text import clean

Message = dict[str, Any]

_MARK = "\ue000"
"""A character that no template writes."""


def call_id(seed: str) -> str:
    """An id of nine letters and digits, as Mistral's templates take them."""
    digest = hashlib.blake2b(seed.encode(), digest_size=10).digest()
    return base64.b32encode(digest).decode().lower()[:9]


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Sequence[Message],
    tools: list[Any] | None = None,
    *,
    prompt: bool = True,
    **variables: Any,
) -> str:
    """The rendered conversation. Args: `prompt`, whether a reply follows; `variables`, further ones of the template.

    Raises `ConfigurationError` for a conversation that the template refuses.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(conversation), tools=tools, tokenize=False, add_generation_prompt=prompt, **variables
        )
    except Exception as error:  # a template is a program: what it makes of roles that it does not know is anything
        roles = ", ".join(message["role"] for message in conversation)
        raise ConfigurationError(
            f"the chat template of {tokenizer.name_or_path or 'this tokenizer'} refuses a conversation of {roles}: {error}. "
            "Set tokenizer.chat_template to one that takes it"
        ) from error
    return str(clean(text))  # no tokenizer reads half an emoji


class ChatTemplate:
    """The chat template of a tokenizer, by what it makes of small conversations.

    Raises `ConfigurationError` for one that renders no question with its answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        if not self._renders([_user(_MARK)]) and not self.takes_blocks:
            raise ConfigurationError(
                f"the chat template of {tokenizer.name_or_path or 'this tokenizer'} renders no user message: set "
                "tokenizer.chat_template to one that does"
            )

    @cached_property
    def takes_system(self) -> bool:
        return self._renders([{"role": "system", "content": _MARK}, _user("?")])

    @cached_property
    def alternates(self) -> bool:
        """True if user and assistant have to take turns."""
        return not self._renders([_user("?"), _user(_MARK)])

    @cached_property
    def takes_blocks(self) -> bool:
        """True if contents are lists of blocks, as templates for images have them."""
        return not self._renders([_user(_MARK)], blocks=False) and self._renders([_user(_MARK)], blocks=True)

    @cached_property
    def takes_parallel_calls(self) -> bool:
        calls = [{"type": "function", "id": call_id(n), "function": {"name": n, "arguments": {}}} for n in ("a", "b")]
        return self._renders([_user(_MARK), {"role": "assistant", "content": "", "tool_calls": calls}])

    @cached_property
    def end(self) -> int | None:
        """The token that ends an assistant's turn. The tokenizer's end token where the template shows none."""
        answered = self.fitted([_user("?"), {"role": "assistant", "content": _MARK}])
        text = apply_template(self.tokenizer, answered, prompt=False).partition(_MARK)[2]
        special = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        first = min((name for name in special if name in text), key=text.find, default=None)
        return special[first] if first is not None else self.tokenizer.eos_token_id

    def fitted(self, conversation: Sequence[Message]) -> list[Message]:
        """The conversation in the roles that the template takes. Instructions first in the user's message, turns in turn."""
        messages = list(conversation)
        if messages and messages[0]["role"] == "system" and not self.takes_system:
            messages[0] = {**messages[0], "role": "user"}
            messages = [*_join_neighbours(messages[:2]), *messages[2:]]
        if self.alternates:
            begun = [_user("(begins)")] if messages and messages[0]["role"] == "assistant" else []
            messages = _join_neighbours([*begun, *messages])
        if any(len(message.get("tool_calls") or ()) > 1 for message in messages) and not self.takes_parallel_calls:
            messages = _one_call_a_turn(messages)
        return [_in_blocks(message) for message in messages] if self.takes_blocks else messages

    def _renders(self, conversation: list[Message], *, blocks: bool | None = None) -> bool:
        """True if the marked content is rendered."""
        in_blocks = self.takes_blocks if blocks is None else blocks
        try:
            return _MARK in apply_template(self.tokenizer, [_in_blocks(m) for m in conversation] if in_blocks else conversation)
        except ConfigurationError:
            return False


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _in_blocks(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _join_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Join neighbours of one role, but for calls and results of tools."""
    joined: list[Message] = []
    for message in messages:
        same = bool(joined) and message["role"] == joined[-1]["role"] != "tool"
        if same and "tool_calls" not in message and "tool_calls" not in joined[-1]:
            message = {**message, "content": "\n\n".join(filter(None, [joined.pop()["content"], message["content"]]))}
        joined.append(message)
    return joined


def _one_call_a_turn(messages: Sequence[Message]) -> list[Message]:
    """Split parallel calls into turns of one call and its result."""
    results = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    written: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        for number, call in enumerate(calls):
            written.append({**message, "content": "" if number else message["content"], "tool_calls": [call]})
            written += [results.pop(call["id"])] if call["id"] in results else []
        if not calls and (message["role"] != "tool" or message["tool_call_id"] in results):
            written.append(message)
    return written
