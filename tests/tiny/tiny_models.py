"""Tiny models with random weights: a tokenizer, a chat template, a Llama."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from dreamgym_lg.integrations.transformers.call_format import (
    CALL_HEAD,
    CALL_MIDDLE,
    CALL_TAIL,
    RESULT_HEAD,
    RESULT_TAIL,
)

SMALL_BASE = Path(__file__).parent / "small_base"
"""A pretrained model of 3.0 M parameters, for tests and the demo that need a trained model in seconds."""

ROLES = ("system", "user", "assistant")
PAD, END = "<|pad|>", "<|end|>"


def _quote(text: str) -> str:
    """As an expression: a template drops line ends that follow a tag."""
    return f"{{{{ {json.dumps(text)} }}}}"


# A conversation without tools is rendered as the roles alone. Calls and results are in Hermes' format. A tool is a line, like
# `get_order(order_id, note?: {"type": "integer"}) Look up an order.`: its JSON schema takes three times the tokens.
CHAT_TEMPLATE = "".join(
    [
        "{% set turns = messages %}{% if tools %}<|system|>",
        "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}{{ messages[0].content }}",
        _quote("\n\n"),
        "{% endif %}",
        _quote("<tools>\n"),
        "{% for tool in tools %}{% set parameters = tool.function.get('parameters') or {} %}",
        "{{ tool.function.name }}(",
        "{% for name, schema in parameters.get('properties', {}).items() %}{{ name }}",
        "{% if name not in parameters.get('required', []) %}?{% endif %}",
        "{% if schema != {'type': 'string'} %}: {{ schema | tojson }}{% endif %}",
        "{% if not loop.last %}, {% endif %}{% endfor %})",
        "{% if tool.function.description %} {{ tool.function.description }}{% endif %}{% if not loop.last %}",
        _quote("\n"),
        "{% endif %}{% endfor %}",
        _quote("\n</tools>"),
        "<|end|>{% endif %}",
        "{% for message in turns %}",
        "{% if message.role == 'assistant' %}<|assistant|>{% generation %}{{ message.content }}{% if message.tool_calls %}",
        "{% for call in message.tool_calls %}{% if message.content or not loop.first %}",
        _quote("\n"),
        "{% endif %}",
        _quote(CALL_HEAD),
        "{{ call.function.name }}",
        _quote(CALL_MIDDLE),
        "{{ call.function.arguments | tojson }}",
        _quote(CALL_TAIL),
        "{% endfor %}{% endif %}<|end|>{% endgeneration %}",
        "{% elif message.role == 'tool' %}<|user|>",
        _quote(RESULT_HEAD),
        "{{ message.content }}",
        _quote(RESULT_TAIL),
        "<|end|>{% else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}{% endfor %}",
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ]
)


def create_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 1024,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    marks: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, with a chat template that only ever appends.

    Args:
        pre_tokenizer: Splits a text before pieces are merged, and ends byte by byte. Default: `ByteLevel`, as GPT-2's.
        marks: Texts that are one token each, counted in `vocab_size`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(marks),
        special_tokens=[PAD, END, *(f"<|{role}|>" for role in ROLES)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def create_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int = 192, layers: int = 2, max_tokens: int = 2048, seed: int = 0
) -> LlamaForCausalLM:
    """A Llama with random weights: about 1 M parameters as it stands.

    A Llama and no Qwen2, for which `AutoTokenizer` would take Qwen2's own way to split text, whatever tokenizer was saved.
    Wide and shallow, with initial weights four times transformers' default: measured on our data, such a model learns to
    copy from its context in a third of the steps.
    """
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=max_tokens,
        initializer_range=0.08,
        attention_bias=True,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)
