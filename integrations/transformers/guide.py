"""Guided decoding by llguidance: calls whose tool exists and whose arguments fit its schema.

Text stays free up to the marker that begins a call. From there on only tokens of fitting calls or the end are drawn, with other
probabilities than the model gives them.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.integrations.transformers.call_format import MARKERS, MISTRAL

_JSON = {"lenient": True, "whitespace_pattern": r"[ \n]{0,8}"}
"""Keywords of a schema that the library does not know are passed over; no reply is lost in spaces."""


class Tag(NamedTuple):
    """A call of one tool: text, arguments, text."""

    begin: str
    schema: dict[str, Any]
    """JSON schema of the arguments."""
    end: str


class Guide(NamedTuple):
    """The grammar of a reply: a `trigger` goes on as one of the tags."""

    trigger: str
    """The beginning of every tag's `begin`."""
    tags: Sequence[Tag]

    @classmethod
    def of(cls, functions: Sequence[dict[str, Any]], before: str, after: str) -> "Guide":
        """For calls in the form `before`, the tool's name, `after` with `{}` for the arguments."""
        opened, _, end = after.partition("{}")
        marker = next((marker for marker in MARKERS if marker in before), before)
        trigger = before[: before.index(marker) + len(marker)].lstrip()
        tools = ((each["function"]["name"], each["function"].get("parameters") or {"type": "object"}) for each in functions)
        return cls(trigger, [Tag(f"{before.lstrip()}{name}{opened}", schema, end) for name, schema in tools])


class Guides:
    """Holds the replies of one model to their guides. Raises `MissingDependency` without the extra `guided`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Sequence[int]) -> None:
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise MissingDependency.extra("llguidance", "guided") from error
        self._tokenizer, self._library = tokenizer, llguidance
        self._words = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(ends))

    def matcher(self, guide: Guide, forced: str) -> Any:
        """Follows one reply, which begins with `forced`, token by token.

        Raises `ConfigurationError` for an impossible schema.
        """
        grammar = lark_grammar(self._tokenizer, guide)
        if error := self._library.LLMatcher.validate_grammar(grammar, self._words):
            raise ConfigurationError(f"no call can be guided to the schemas of these tools: {error}; leave out guided=")
        matcher = self._library.LLMatcher(self._words, grammar)
        if not matcher.consume_tokens(self._tokenizer(forced, add_special_tokens=False)["input_ids"]):
            raise ConfigurationError(f"a reply that begins with {forced!r} is no call of these tools: {matcher.get_error()}")
        return matcher


def mask(matcher: Any, logits: torch.Tensor) -> None:
    """Leave the logits of one row, [vocabulary], to the tokens that may come next."""
    if not matcher.is_error():  # of a schema too large for it: the rest of the reply is free
        allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8).bool()
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)


def lark_grammar(tokenizer: PreTrainedTokenizerBase, guide: Guide) -> str:
    """The guide in llguidance's grammar language. A trigger that is a special token is named by its number."""
    tokens = tokenizer.added_tokens_decoder.items()
    special = next((number for number, token in tokens if token.special and token.content == guide.trigger), None)
    trigger = json.dumps(guide.trigger) if special is None else f"<[{special}]>"
    more = "" if guide.trigger == MISTRAL else f"(BETWEEN {trigger} call)*"  # Mistral's list is read to its end, and no further
    if special is None:
        lines = [f"start: TEXT | begun call {more}", f"begun[lazy]: TEXT {trigger}"]
    else:
        lines = [f"start: TEXT | TEXT {trigger} call {more}"]
    lines += [r"TEXT: /(.|\n)*/", r"BETWEEN: /[;\n ]{1,2}/", f"call: {' | '.join(f'call_{i}' for i in range(len(guide.tags)))}"]
    for i, (begin, schema, end) in enumerate(guide.tags):
        lines.append(f"call_{i}: {json.dumps(begin.removeprefix(guide.trigger))} arguments_{i} {json.dumps(end)}")
        lines.append(f"arguments_{i}: %json {json.dumps({'additionalProperties': False, **schema, 'x-guidance': _JSON})}")
    return "\n".join(["%llguidance {}", *lines])
