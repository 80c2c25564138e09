"""Make the small base again: `python -m dreamgym_lg.integrations.transformers.small_base.pretrain --out models/base`.

A Llama whose first two layers begin as the circuit that copying needs (Elhage et al. 2021, Olsson et al. 2022): heads that
attend one and two tokens back, and heads that attend to what followed the same two tokens earlier and copy it. Left to
chance, that circuit is what a model this small takes thousands of steps to find, and finds inexactly.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Regex, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaAttention

from dreamgym_lg.integrations.transformers import tiny_models
from dreamgym_lg.integrations.transformers.loading import trains_bfloat16
from dreamgym_lg.integrations.transformers.small_base.names import known_words
from dreamgym_lg.integrations.transformers.small_base.skills import VERBS, conversation
from dreamgym_lg.integrations.transformers.small_base.tool_skills import ACTS

COMMON = 3500
"""So many of `known_words()` are common ones, which the tokenizer keeps in few pieces."""
VOCABULARY, HIDDEN, LAYERS, HEADS = 4096, 192, 6, 4
HEAD = HIDDEN // HEADS
ROPE_THETA = 1e8
"""Large, so that most of a head's dimensions compare content and not position; Qwen2.5 has 1e6."""
POSITIONAL = 9
"""Pairs of rotary dimensions that turn too fast to compare content over 1,000 tokens."""
TOKENS = HIDDEN // 2
"""Dimensions of the residual stream that the embeddings begin in; the previous two tokens are written to the others."""

MATCHED = ((1.0,), (1.0,), (1.0, 0.7), (1.0, 0.7))
"""How much each of the last tokens counts when a head of the second layer looks for where they stood before."""
POOL = 48
"""So many texts wait to be packed where they fit."""
LENGTHS, LONGEST = (512, 1024), 768
"""Tokens of a packed row, and of a text at most: attention over short rows costs half as much."""
MARKS = ["<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
SPACED = (
    "a an the and or of in on to is are was be it its you your my I we as at by for from with that this not no then there "
    "what which where who how if can will do does has have was were but also You The It There"
)
SPLIT = Regex(
    rf" (?:{'|'.join(SPACED.split())})(?![\p{{L}}\p{{N}}_])"  # words that nobody copies, with the space before them
    rf"|[,.:;?!] (?!(?:{'|'.join(SPACED.split())})(?![\p{{L}}\p{{N}}_]))"
    r"|\p{L}+|\p{N}"  # any other word is the same tokens after a space, a quote or a line break; digits are one by one
    r'| \{"|": "|", "| "|":|",|"\}+|\{"|\n+'  # JSON
    r"|."
)


class Row(NamedTuple):
    """Tokens, and which of them are learned."""

    ids: list[int]
    learned: list[bool]


def create_tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level BPE of the small base, with the chat template of all small models."""
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(SPLIT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tiny_models.create_tokenizer(_texts(), vocab_size=VOCABULARY, pre_tokenizer=split, marks=MARKS)


def _texts() -> Iterator[str]:
    """What the tokenizer's pieces are counted in: conversations, tools, every word."""
    for i in range(600):
        made = conversation(f"tokenizer/{i}")
        yield from (message["content"] for message in made.messages)
        yield from (json.dumps(call["function"]) for message in made.messages for call in message.get("tool_calls", ()))
        yield from (json.dumps(tool["function"]["parameters"]) for tool in made.tools or ())
        yield from (tool["function"]["name"] + tool["function"]["description"] for tool in made.tools or ())
    for word in known_words()[:COMMON]:
        yield from [word] * 20
    yield from known_words()
    yield from (word.capitalize() for word in [*VERBS, *ACTS, *known_words()[:100]] for _ in range(20))


# --- The model ------------------------------------------------------------------------------------------------------


def create_copying_model(vocabulary: int, *, seed: int = 0) -> LlamaForCausalLM:
    """A Llama that copies by the previous two tokens before any training; all that is not this circuit adds nothing yet.

    Measured: of random strings among 4,096 tokens that were said once before, it continues 0.98 of the tokens right.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=HIDDEN**-0.5,
        attention_bias=True,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.11)
        model.model.embed_tokens.weight[:, TOKENS:] *= 0.1
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
        compared = _orthogonal(HEAD, TOKENS)
        _attend_back(model.model.layers[0].self_attn, compared)
        _continue_matches(model, compared)
    return model


def deepen(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A copy of the model, up to so many layers deep; those behind its own add nothing yet."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = layers, None
    deeper = LlamaForCausalLM(config)
    deeper.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in deeper.model.layers[len(model.model.layers) :]:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
    return deeper


def _orthogonal(rows: int, columns: int) -> torch.Tensor:
    found, _ = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns)))
    return found if rows >= columns else found.T


def _attend_back(attention: LlamaAttention, compared: torch.Tensor, sharpness: float = 8.0) -> None:
    """Let head n attend n + 1 tokens back, by its biases alone, and write what stands there to its own dimensions.

    Args:
        compared: (HEAD, TOKENS): the projection of an embedding by which tokens are compared.
        sharpness: By how much the score exceeds that of the neighbouring positions.
    """
    turns = ROPE_THETA ** (-torch.arange(HEAD // 2) * 2 / HEAD)
    size = math.sqrt(sharpness * math.sqrt(HEAD) / (1 - turns.cos()).sum())
    ones, zeros = torch.ones(HEAD // 2), torch.zeros(HEAD // 2)
    for head in range(HEADS):
        rows, back = slice(head * HEAD, (head + 1) * HEAD), head + 1
        attention.q_proj.weight[rows] *= 0.1
        attention.k_proj.weight[rows] *= 0.1
        attention.k_proj.bias[rows] = size * torch.cat([ones, zeros])
        attention.q_proj.bias[rows] = size * torch.cat([(turns * back).cos(), -(turns * back).sin()])
        attention.v_proj.weight[rows] *= float(back > 2)
        if back <= 2:  # the others' place is learned
            attention.v_proj.weight[rows, :TOKENS] = 0.1 * compared
            attention.o_proj.weight[_back(head), rows] = torch.eye(HEAD)


def _back(head: int) -> slice:
    """Where in the residual stream the token `head` + 1 back is written."""
    return slice(TOKENS + head * HEAD, TOKENS + (head + 1) * HEAD)


def _continue_matches(model: LlamaForCausalLM, compared: torch.Tensor, match: float = 25.0, copy: float = 0.8) -> None:
    """Let the second layer's heads attend to where the last two tokens stood before one, and copy that one.

    Args:
        match: The attention score of a full match.
        copy: How strongly it is copied.
    """
    layer = model.model.layers[1]
    attention = layer.self_attn
    slow = [i for i in range(HEAD) if i % (HEAD // 2) >= POSITIONAL]
    ids = torch.randint(10, model.config.vocab_size, (4, 128))
    seen = layer.input_layernorm(model.model(input_ids=ids, output_hidden_states=True).hidden_states[1])
    for head in range(HEADS):
        rows, mixed = slice(head * HEAD, (head + 1) * HEAD), _orthogonal(len(slow), HEAD)
        keys, queries = torch.zeros(HEAD, HIDDEN), torch.zeros(HEAD, HIDDEN)
        for back, weight in enumerate(MATCHED[head]):
            keys[slow, _back(back)] = weight * mixed
            queries[slow, _back(back - 1) if back else slice(TOKENS)] = mixed if back else mixed @ compared
        scores = ((seen[:, 1:] @ keys.T) * (seen[:, :-1] @ queries.T)).sum(-1) / math.sqrt(HEAD)
        scale = math.sqrt(match / scores.mean().item())
        attention.q_proj.weight[rows], attention.k_proj.weight[rows] = queries * scale, keys * scale
    what = _orthogonal(HIDDEN, TOKENS)
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:, :TOKENS] = copy * what
    attention.o_proj.weight[:TOKENS] = what.T


# --- Training -------------------------------------------------------------------------------------------------------


def row(tokenizer: PreTrainedTokenizerFast, seed: int | str) -> Row:
    """One pretraining text: a conversation, of which the replies are learned, or (one in eight) a string of random tokens
    of which spans are said again, so that every token of the vocabulary is copied, among many and among few."""
    rng = Random(f"row/{seed}")
    if rng.random() < 1 / 8:
        return random_spans(rng, len(tokenizer))
    made = conversation(seed)
    encoded = tokenizer.apply_chat_template(
        made.messages, tools=made.tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return Row(encoded["input_ids"], [bool(x) for x in encoded["assistant_masks"]])


def random_spans(rng: Random, vocabulary: int) -> Row:
    """Random tokens, then spans of them, whose first two or three tokens say which span it is and are not learned."""
    size = rng.choice([12, 40, 160, vocabulary])
    alphabet = [rng.randrange(5, vocabulary) for _ in range(size)]
    ids = [rng.choice(alphabet) for _ in range(rng.randint(10, 80))]
    learned, told = [False] * len(ids), list(ids)
    for _ in range(rng.randint(4, 10)):
        length, hint = rng.randint(5, min(20, len(told))), 2 if size > 40 else 3
        at = rng.randint(0, len(told) - length)
        ids += told[at : at + length]
        learned += [i >= hint for i in range(length)]
    return Row(ids, learned)


def batches(
    tokenizer: PreTrainedTokenizerFast, *, tokens: int, lengths: Sequence[int], seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of packed rows, padded: ids and what is learned, each of shape (`tokens` / length, length)."""
    rng, number, waiting = Random(seed), 0, list[Row]()
    while True:
        length = rng.choice(lengths)
        ids = torch.zeros(tokens // length, length, dtype=torch.long)
        learned = torch.zeros(tokens // length, length, dtype=torch.bool)
        for packed in range(len(ids)):
            at = 0
            while at < length:
                while len(waiting) < POOL:
                    made, number = row(tokenizer, f"{seed}/{number}"), number + 1
                    waiting += [made] if len(made.ids) <= LONGEST else []
                fitting = [each for each in waiting if len(each.ids) <= length - at]
                if not fitting:
                    break
                best = fitting[0] if at < length // 2 else max(fitting, key=lambda each: len(each.ids))
                waiting.remove(best)
                ids[packed, at : at + len(best.ids)] = torch.tensor(best.ids)
                learned[packed, at : at + len(best.ids)] = torch.tensor(best.learned)
                at += len(best.ids)
        yield ids, learned


def pretrain(
    out: Path,
    *,
    steps: int,
    seed: int = 0,
    learning_rate: float = 1.2e-3,
    tokens: int = 4096,
    start: Path | None = None,
    compiled: bool = False,
) -> None:
    """Write tokenizer and weights (bfloat16) to `out`; every 100 steps, so that a run can be stopped.

    Args:
        tokens: Of one batch.
        start: A folder to go on from, its model deepened to `LAYERS`; None to begin with `create_copying_model`.
        compiled: Compile the model (`torch.compile`), which needs a C++ compiler and takes a minute.
    """
    tokenizer = create_tokenizer() if start is None else PreTrainedTokenizerFast.from_pretrained(start)
    if start is None:
        model = create_copying_model(len(tokenizer), seed=seed)
    else:
        model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    model = deepen(model, LAYERS)
    if compiled:
        model.model.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    begun, recent, data = time.monotonic(), [], batches(tokenizer, tokens=tokens, lengths=LENGTHS, seed=seed)
    for step in range(1, steps + 1):
        rate = learning_rate * min(step / 50, 1.0, 0.02 + 4 * (1 - step / steps))  # constant, down in the last quarter
        for group in optimizer.param_groups:
            group["lr"] = rate
        recent.append(_update(model, optimizer, *next(data)))
        if step % 20 == 0:
            spent = time.monotonic() - begun
            print(
                f"step {step}: loss {sum(recent) / len(recent):.3f}, {step * tokens / spent:.0f} tokens/s, {spent:.0f} s",
                flush=True,
            )
            recent.clear()
        if step % 100 == 0 or step == steps:
            tokenizer.save_pretrained(out)
            deepen(model, LAYERS).to(torch.bfloat16).save_pretrained(out)


def _update(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: torch.Tensor, learned: torch.Tensor) -> float:
    with torch.autocast("cpu", torch.bfloat16, enabled=trains_bfloat16()):
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[learned[:, 1:]])
    loss = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][learned[:, 1:]])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=9500, help="optimiser steps, of 4,096 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1.2e-3)
    parser.add_argument("--start", type=Path, help="go on from this folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", dest="compiled", help="a quarter faster; needs a C++ compiler")
    given = vars(parser.parse_args())
    torch.set_num_threads(given.pop("threads"))
    pretrain(given.pop("out"), **given)


if __name__ == "__main__":
    main()
