"""Tiny models, conversations, and a hand on what is sampled."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from tiny_models import CHAT_TEMPLATE, create_model, create_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dreamgym_lg.integrations.transformers import engine as transformers_engine
from dreamgym_lg.integrations.transformers.batch import Batch
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.requests import Request
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Segment

TEXTS = [
    "You are in the kitchen. There is a red apple on the table.",
    "take the apple",
    "put the apple in the fridge – très bien, 料理",
]
WORDS = ["the", "kitchen", "holds", "a", "red", "apple", "on", "its", "table", "and", "you", "take", "it"]

CALL_TEXTS = [
    '{"type": "function", "function": {"name": "look", "description": "Look at a place.", "parameters": {"properties": '
    '{"place": {"type": "string"}, "times": {"default": 1, "type": "integer"}}, "required": ["place"], "type": "object"}}}',
    '<tool_call>\n{"name": "look", "arguments": {"times":0, "place":"box" }}\n</tool_call>',
    '{"name" : "look",  "parameters": {"times":0, "place":"box" }}',
    '{"arguments":  {"times":0, "place":"box" }, "name":"look"}',
] * 3

torch.set_num_threads(1)  # models this small take twice as long on two

OLD_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The template of models trained before it knew of tools."""

MISTRAL_TEMPLATE = (
    "{{ '<s>' }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% set turn = namespace(user=true) %}{% for message in messages %}"
    "{% if message.role in ('user', 'assistant') and not message.tool_calls %}"
    "{% if (message.role == 'user') != turn.user %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set turn.user = not turn.user %}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ message.content | tojson }}, "
    '"call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] }}{{ ', \"id\": \"' + call.id + '\"}' }}{% if not loop.last %}, {% endif %}"
    "{% endfor %}{{ ']</s>' }}{% else %}{{ message.content + '</s>' }}{% endif %}{% endfor %}"
)
"""What Mistral's templates ask of a conversation: roles alternate, except around tool calls, whose ids have nine characters."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count batches: a busy machine may take longer than `IDLE_SECONDS` to make the calls. Each batch waits."""
    monkeypatch.setattr(transformers_engine, "IDLE_SECONDS", 0.1)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tokenizer(TEXTS, vocab_size=320)


@pytest.fixture
def policy(tokenizer: PreTrainedTokenizerFast) -> LocalChatModel:
    model = create_model(tokenizer, hidden_size=64, layers=2, max_tokens=512)
    return LocalChatModel(model=model, tokenizer=tokenizer, name_or_path="tiny", max_new_tokens=12)


def _opening(i: int) -> list[BaseMessage]:
    return [SystemMessage("Answer."), HumanMessage(" ".join(WORDS[j % len(WORDS)] for j in range(i, 3 * i + 2)) + f" {i}")]


async def _converse(policy: BaseChatModel, i: int, *, turns: int, seed: int | None = None) -> TokenRecorder:
    with TokenRecorder(seed=seed) as recorder:
        messages = _opening(i)
        for turn in range(turns):
            messages += [await policy.ainvoke(messages), HumanMessage(" ".join(WORDS[: (i * (turn + 3)) % 11]) + " then?")]
        return recorder


async def _converse_all(policy: BaseChatModel, n: int, *, turns: int) -> list[TokenRecorder]:
    return await asyncio.gather(*(_converse(policy, i, turns=turns, seed=i) for i in range(n)))


@torch.no_grad()
def _forward_error(policy: LocalChatModel, segment: Segment) -> float:
    ids = torch.tensor([segment.token_ids])
    logits = policy.model.eval()(ids).logits[0, :-1].float() / (policy.temperature or 1)
    truth = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    chosen = torch.tensor(segment.sampled[1:]).bool()
    return float((truth - torch.tensor(segment.logprobs[1:]))[chosen].abs().max())


@pytest.fixture(name="opening", scope="session")
def _opening_fixture() -> Callable[[int], list[BaseMessage]]:
    """Conversations of many lengths, none like another."""
    return _opening


@pytest.fixture(name="converse", scope="session")
def _converse_fixture() -> Callable[..., Any]:
    """One conversation, and what was recorded of it."""
    return _converse


@pytest.fixture(name="converse_all", scope="session")
def _converse_all_fixture() -> Callable[..., Any]:
    """Many conversations at once."""
    return _converse_all


@pytest.fixture(name="forward_error", scope="session")
def _forward_error_fixture() -> Callable[[LocalChatModel, Segment], float]:
    """How far the recorded log-probabilities are from those of one plain forward pass over the segment."""
    return _forward_error


@pytest.fixture
def steer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Request], str | Sequence[int]]], None]:
    """Have the models say what a function of the request says, instead of what they would draw.

    Everything else is as it is: forward passes, log-probabilities, stop strings. A text is sampled as no tokenizer would
    encode it: `_spell` says how.
    """

    def install(say: Callable[[Request], str | Sequence[int]]) -> None:
        def draw(batch: Batch, logprobs: torch.Tensor) -> torch.Tensor:
            return torch.tensor([_next(batch, i, say) for i in range(len(batch.rows))])

        monkeypatch.setattr(Batch, "_draw", draw)

    return install


def _next(batch: Batch, i: int, say: Callable[[Request], str | Sequence[int]]) -> int:
    row, tokenizer = batch.rows[i], batch.decoder.tokenizer
    said = say(row.request)
    if isinstance(said, str):
        assert said.startswith(row.request.forced), f"{said!r} does not begin with {row.request.forced!r}"
        said = _spell(tokenizer, said[len(row.request.forced) :])
    return [*said, tokenizer.eos_token_id][len(row.sampled)]


SPELLED = 6
"""So many characters at either end of a text are sampled one by one."""


@functools.cache
def _spell(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ends character by character, the middle as the tokenizer has it: few tokens, and other ones than the tokenizer's."""
    special = next((token for token in tokenizer.added_tokens_encoder if text.startswith(token)), "")
    rest = text[len(special) :]
    end = max(len(rest) - SPELLED, SPELLED)
    pieces = filter(None, [special, *rest[:SPELLED], rest[SPELLED:end], *rest[end:]])
    return [id for piece in pieces for id in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def _trl(name: str) -> str:
    """A chat template out of TRL's wheel, as the model's makers publish it."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


TEMPLATES: dict[str, tuple[str | None, str]] = {
    "from scratch": (None, "<|end|>"),
    "without tools": (OLD_TEMPLATE, "<|end|>"),
    "qwen2.5": (_trl("qwen2_5"), "<|im_end|>"),
    "qwen3": (_trl("qwen3"), "<|im_end|>"),
    "qwen3-2507": (_trl("qwen3_instruct_2507"), "<|im_end|>"),
    "llama3.1": (_trl("llama3_1"), "<|eot_id|>"),
    "llama3.2": (_trl("llama3_2"), "<|eot_id|>"),
    "mistral": (MISTRAL_TEMPLATE, "</s>"),
    "gemma3": (_trl("gemma3"), "<end_of_turn>"),
}


@pytest.fixture
def of_template() -> Callable[[str], LocalChatModel]:
    """A chat model with the template of this family, its special tokens in the vocabulary. Its weights and tokenizer are
    shared by all tests, its engine and caches are new."""

    def make(family: str) -> LocalChatModel:
        model, tokenizer = _model_of_template(family)
        return LocalChatModel(model=model, tokenizer=tokenizer, name_or_path=family, max_new_tokens=400)

    return make


@functools.cache
def _model_of_template(family: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    template, end = TEMPLATES[family]
    # templates and calls become few tokens: what is read and sampled is short
    templates = [other for other, _ in TEMPLATES.values() if other is not None]
    tokenizer = create_tokenizer([*TEXTS, *CALL_TEXTS, CHAT_TEMPLATE, *templates], vocab_size=1500)
    tokenizer.add_special_tokens({"eos_token": end})
    if family == "mistral":
        tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    if template is not None:
        tokenizer.chat_template = template
    return create_model(tokenizer, hidden_size=32, layers=1, max_tokens=8192), tokenizer
