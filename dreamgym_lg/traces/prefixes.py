"""Conversations that begin longer ones. An export turn by turn holds each as a trace."""

from collections.abc import Iterator
from hashlib import blake2b

from langchain_core.messages import AIMessage, BaseMessage

from dreamgym_lg.actions import render_call, render_malformed
from dreamgym_lg.traces.rows import Conversation


class Prefixes:
    """Digests of the beginnings of conversations, alone and with an outcome of the whole."""

    def __init__(self) -> None:
        self._digests = set[bytes]()

    def add(self, conversation: Conversation, outcome: str) -> None:
        """Add a conversation's proper prefixes. Args: `outcome`, "" for an unknown one."""
        for digest in [*_digests(conversation)][:-1]:
            self._digests |= {digest, digest + outcome.encode()}

    def fold(self, conversation: Conversation, outcome: str) -> bool:
        """True for the beginning of a longer conversation. With an outcome, the longer one needs the same."""
        *_, digest = _digests(conversation)
        return digest + outcome.encode() in self._digests


def _digests(conversation: Conversation) -> Iterator[bytes]:
    """Digests of the thread and its first messages, one more each time."""
    digest = blake2b(conversation.thread.encode("utf-8", "surrogatepass"), digest_size=16)
    for message in conversation.messages:
        digest.update(_text(message).encode("utf-8", "surrogatepass"))
        yield digest.digest()


def _text(message: BaseMessage) -> str:
    """A message without ids, which exports may leave out."""
    if not isinstance(message, AIMessage):
        return repr((message.type, message.content))
    calls = [render_call(call["name"], call["args"]) for call in message.tool_calls]
    return repr((message.text, calls, [render_malformed([call]) for call in message.invalid_tool_calls]))
