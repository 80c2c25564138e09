"""Request, reply and engine protocol."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from langchain_core.messages.ai import UsageMetadata
from transformers import PreTrainedTokenizerBase

ToolChoice = str | bool | dict[str, Any] | None
"""The tool that a reply has to call, as OpenAI and LangChain write it (`LocalChatModel.bind_tools`)."""

ResponseFormat = dict[str, Any] | type | None
"""The form of a reply: OpenAI's `response_format`, a pydantic class or another schema."""


@dataclass(slots=True)
class Request:
    """One call: a conversation in, a reply out."""

    conversation: Sequence[dict[str, Any]]
    """`{"role", "content"}` messages, as chat templates take them; with tools also `tool_calls`, `tool_call_id`, `name`."""
    temperature: float = 1.0
    max_new_tokens: int = 64
    seed: int | None = None
    """Fixes what is sampled, independent of the batch this call happens to share."""
    stop: tuple[str, ...] = ()
    owner: int | None = None
    """The episode of the call. Episodes with the same text may have sampled it as different tokens."""
    tools: list[dict[str, Any]] | None = None
    """Schemas for the chat template, in OpenAI's format."""
    tool_names: frozenset[str] | None = None
    """The tools that may be called; None: the reply is text, whatever it looks like."""
    wants_json: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""
    splices: Mapping[str, str] = field(default_factory=dict)
    """Sampled text by the placeholder that the template renders in its place."""
    forced: str = ""
    """The beginning of the reply, given and not sampled."""
    skipped_ids: frozenset[int] | None = None
    """Special tokens to leave out of the text; None: all."""
    is_read_whole: bool = False
    """True: the reply is read at its end, and not streamed."""
    on_text: Callable[[str], None] | None = None
    """Called from the engine's thread with each new piece of text, but for the last."""

    def reply(self, tokenizer: PreTrainedTokenizerBase, sampled: Sequence[int]) -> tuple[str, bool]:
        """The text of a reply, cut before the first stop string. And True if it was cut."""
        skipped = self.skipped_ids
        if skipped is None:
            text = self.forced + tokenizer.decode(sampled, skip_special_tokens=True)
        else:
            text = self.forced + tokenizer.decode([token for token in sampled if token not in skipped])
        cut = min((at for stop in self.stop if (at := text.find(stop, len(self.forced))) >= 0), default=-1)
        return (text, False) if cut < 0 else (text[:cut], True)


@dataclass(slots=True, frozen=True)
class Generated:
    """The reply, with the exact tokens read and sampled."""

    text: str
    """The whole reply, its forced beginning included."""
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    """Natural log-probability of each sampled token at the request's temperature (at 0: at temperature 1)."""
    finish_reason: str
    """`stop` at an end token or stop string, `length` at `max_new_tokens`."""
    policy_version: str = ""
    """The server's name of the weights that sampled it; "" in process."""

    @property
    def usage(self) -> UsageMetadata:
        """The token counts, as LangChain reports them."""
        prompt, sampled = len(self.prompt_ids), len(self.sampled_ids)
        return UsageMetadata(input_tokens=prompt, output_tokens=sampled, total_tokens=prompt + sampled)


@runtime_checkable
class Engine(Protocol):
    """Generates a model's replies: in this process, in another, or on a server. Thread-safe."""

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a reply."""

    def submit(self, request: Request) -> "Future[Generated]":
        """Request a reply; returns at once. Failures are the future's exception."""

    def clear(self) -> None:
        """Forget every cached key and value; called when the weights have changed."""
