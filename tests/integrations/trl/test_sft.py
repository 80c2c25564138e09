"""Supervised fine-tuning: what is learned is what should be, and a model folder is whole or not there."""

import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage
from tiny_models import create_model, create_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dreamgym_lg.errors import NothingToTrain
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl import sft
from dreamgym_lg.integrations.trl.options import StepOptions
from dreamgym_lg.integrations.trl.rows import tokenize
from dreamgym_lg.integrations.trl.sft import fine_tune, save_model, train_sft
from dreamgym_lg.integrations.trl.token_trainer import TokenTrainer
from dreamgym_lg.learner import TrainingRow, sft_row
from dreamgym_lg.types import Segment

COLOURS = {"apple": "red", "pear": "green", "plum": "blue", "lemon": "yellow"}


def conversation(fruit: str) -> list[dict[str, str]]:
    colour = COLOURS[fruit]
    return [
        {"role": "system", "content": "Name the colour."},
        {"role": "user", "content": f"a {fruit}"},
        {"role": "assistant", "content": f"valid, it is\nthe colour {colour}\nfor it <|user|> – 料理"},
        {"role": "user", "content": f"and {fruit}s?"},
        {"role": "assistant", "content": colour},
    ]


CONVERSATIONS = [conversation(fruit) for fruit in COLOURS]
SHORT = [[conversation[1], conversation[4]] for conversation in CONVERSATIONS]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tokenizer((m["content"] for conversation in CONVERSATIONS for m in conversation), vocab_size=330)


def model_of(tokenizer: PreTrainedTokenizerFast) -> Any:
    return create_model(tokenizer, hidden_size=32, layers=1, max_tokens=256)


def learned(tokenizer: PreTrainedTokenizerFast, row: TrainingRow) -> list[str]:
    """The runs of learned tokens, as text."""
    runs = groupby(zip(row.segment.token_ids, row.segment.sampled, strict=True), lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for own, run in runs if own]


def test_what_is_learned_are_the_replies_with_their_end(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize(tokenizer, CONVERSATIONS)
    for row, messages in zip(rows, CONVERSATIONS, strict=True):
        replies = [message["content"] + "<|end|>" for message in messages if message["role"] == "assistant"]
        assert learned(tokenizer, row) == replies
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        assert tokenizer.decode(row.segment.token_ids) == rendered


def test_what_is_learned_is_what_the_policy_reads(tokenizer: PreTrainedTokenizerFast) -> None:
    """The prompt of a call is a prefix of the training row: a model is asked what it was taught."""
    (row,) = tokenize(tokenizer, CONVERSATIONS[:1])
    prompt = tokenizer.apply_chat_template(CONVERSATIONS[0][:2], add_generation_prompt=True, return_dict=False)
    assert row.segment.token_ids[: row.segment.sampled.index(1)] == prompt


def test_a_thought_is_opened_once(tokenizer: PreTrainedTokenizerFast) -> None:
    """By the template, as DeepSeek-R1's, or else by the reply."""
    opening = deepcopy(tokenizer)
    opening.chat_template += "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    asked = {"role": "user", "content": "a plum"}
    answer = AIMessage("blue", additional_kwargs={"reasoning_content": "it is\nfor it"})
    for each in (tokenizer, opening):
        (row,) = tokenize(each, [[asked, answer]])
        text = "<|assistant|><think>\nit is\nfor it\n</think>\n\nblue<|end|>"
        assert each.decode(row.segment.token_ids).endswith(f"a plum<|end|>{text}")
        assert learned(each, row) == [text[len("<|assistant|>" if each is tokenizer else "<|assistant|><think>\n") :]]


def test_weights_decide_what_is_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    """Two answers to one question, one with no weight: only the other is learned."""
    rows = tokenize(tokenizer, [[SHORT[0][0], {"role": "assistant", "content": colour}] for colour in ("red", "blue")])
    model = model_of(tokenizer)
    weighed = [sft_row(row.segment, weight) for row, weight in zip(rows, (1.0, 0.0), strict=True)]
    train_sft(model, weighed, steps=30, learning_rate=1e-2)
    policy = LocalChatModel(model=model, tokenizer=tokenizer, temperature=0, max_new_tokens=8)
    assert policy.invoke("a apple").text == "red"


def test_training_lowers_the_loss_and_learns_a_mapping(tokenizer: PreTrainedTokenizerFast) -> None:
    model, losses = model_of(tokenizer), dict[int, float]()
    last = train_sft(model, tokenize(tokenizer, SHORT), steps=60, learning_rate=1e-2, on_step=losses.__setitem__)
    assert list(losses) == list(range(1, 61))
    assert last < 0.1 < 2 < losses[1]
    assert last == pytest.approx(sum(list(losses.values())[-6:]) / 6)
    assert not model.training
    policy = LocalChatModel(model=model, tokenizer=tokenizer, temperature=0, max_new_tokens=8)
    assert {fruit: policy.invoke(f"a {fruit}").text for fruit in COLOURS} == COLOURS


def test_the_same_seed_gives_the_same_weights(tokenizer: PreTrainedTokenizerFast) -> None:
    models = [model_of(tokenizer) for _ in range(3)]
    rows = tokenize(tokenizer, SHORT)
    for model, seed in zip(models, (0, 0, 1), strict=True):
        train_sft(model, rows, steps=3, batch_size=2, seed=seed)
    first, same, other = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_the_number_of_passes_does_not_matter(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [sft_row(row.segment, 1.0 + number) for number, row in enumerate(tokenize(tokenizer, SHORT))]
    trained, losses = [], []
    for tokens in (1, 1 << 20):  # a row a pass, or all rows in one
        monkeypatch.setattr(sft, "_TOKENS_A_PASS", tokens)
        monkeypatch.setattr(sft, "precision", lambda *_, **__: {"bf16": False})
        model = model_of(tokenizer)
        losses.append(train_sft(model, rows, steps=2, batch_size=len(rows), seed=0))
        trained.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], atol=1e-5, rtol=1e-4)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_batches_do_not_come_in_order_of_their_length(tokenizer: PreTrainedTokenizerFast) -> None:
    """An agent that gives up early has short episodes: at the end of such an order it would have learned to give up."""
    model, lengths = model_of(tokenizer), list[int]()
    model.register_forward_pre_hook(lambda _, __, given: lengths.append(given["input_ids"].size(1)), with_kwargs=True)
    rows = [row_of([*range(10, 20 + length)], sampled=1) for length in range(64)]

    train_sft(model, rows, steps=16, batch_size=4, learning_rate=1e-3)

    assert len(lengths) == 16
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))


def row_of(ids: list[int], *, sampled: int) -> TrainingRow:
    own = [0, *[sampled] * (len(ids) - 1)]
    return sft_row(Segment(token_ids=ids, sampled=own, logprobs=[0.0] * len(ids), temperature=1.0))


@pytest.mark.parametrize("number", [0, 1])
def test_rows_without_a_token_to_learn_teach_nothing(tokenizer: PreTrainedTokenizerFast, number: int) -> None:
    with pytest.raises(NothingToTrain, match=f"none of the {number} rows"):
        train_sft(model_of(tokenizer), [row_of([1, 2], sampled=0)] * number, steps=1)


@pytest.mark.slow
def test_fine_tune_writes_a_model_that_answers(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    start, to = tmp_path / "start", tmp_path / "to"
    save_model(model_of(tokenizer), tokenizer, start)
    for _ in range(2):  # the second time over the first
        loss = fine_tune(start, to, tokenize(tokenizer, SHORT * 20), steps=40, learning_rate=1e-2)
    assert loss < 0.5
    assert LocalChatModel.from_path(to, temperature=0, max_new_tokens=8).invoke("a plum").text == "blue"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start", "to"]


@pytest.mark.slow
def test_a_low_loss_does_not_end_a_training(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Most tokens of a tool call are easy: the mean says little about an id's few (SmolLM2 looped at a mean of 0.1)."""
    start, rows, losses = tmp_path / "start", tokenize(tokenizer, SHORT * 20), dict[int, float]()
    save_model(model_of(tokenizer), tokenizer, start)
    fine_tune(start, tmp_path / "low", rows, steps=60, learning_rate=1e-2)
    fine_tune(tmp_path / "low", tmp_path / "to", rows, steps=20, lora=True, on_step=losses.__setitem__)
    assert len(losses) == 20 and max(losses.values()) < 0.1


def test_a_held_out_loss_that_has_stopped_falling_ends_a_training_and_the_lowest_is_kept(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held out contradicts what is learned: at first only the form of an answer is."""
    watching = list[sft.EarlyStopping]()

    class Watched(sft.EarlyStopping):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            watching.append(self)

    monkeypatch.setattr(sft, "EarlyStopping", Watched)
    start, to, steps = tmp_path / "start", tmp_path / "to", dict[int, float]()
    save_model(model_of(tokenizer), tokenizer, start)
    others = [[asked, {**SHORT[0][1], "content": SHORT[number - 1][1]["content"]}] for number, (asked, _) in enumerate(SHORT)]
    rows, held_out = tokenize(tokenizer, SHORT * 100), tokenize(tokenizer, others)
    fine_tune(start, to, rows, steps=200, batch_size=2, learning_rate=1e-2, held_out=held_out, on_step=steps.__setitem__)
    (watched,) = watching
    best = min(watched.losses, key=lambda step: watched.losses[step])
    assert len(steps) == best + 4 * watched.every < 200 and watched.losses[len(steps)] > watched.losses[best]
    saved = AutoModelForCausalLM.from_pretrained(to).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in watched.best.items()) and watched.best


def test_a_killed_training_goes_on_from_its_checkpoint(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "SAVE_SECONDS", 0.0)
    start, rows, steps = tmp_path / "start", tokenize(tokenizer, SHORT), list[int]()
    save_model(model_of(tokenizer), tokenizer, start)
    measured = list[sft.EarlyStopping]()
    monkeypatch.setattr(sft.EarlyStopping, "restore", lambda self, model: measured.append(self))
    options: dict[str, Any] = {"steps": 6, "batch_size": 2, "learning_rate": 1e-2, "held_out": rows}
    fine_tune(start, tmp_path / "whole", rows, **options)

    def on_step(step: int, loss: float) -> None:
        steps.append(step)
        if len(steps) == 4:
            raise KeyboardInterrupt

    killed = partial(fine_tune, start, tmp_path / "to", rows, checkpoints=tmp_path / "kept", on_step=on_step, **options)
    with pytest.raises(KeyboardInterrupt):
        killed()
    assert not (tmp_path / "to").exists() and torch.load(tmp_path / "kept" / "training.pt")["steps"] == 3
    killed()
    assert steps == [1, 2, 3, 4, 4, 5, 6] and not (tmp_path / "kept").exists()
    both = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "to")]
    assert all(torch.allclose(both[0][name], both[1][name], atol=1e-5) for name in both[0])
    whole, resumed = measured
    assert list(resumed.losses) == list(range(1, 7)) and resumed.losses == pytest.approx(whole.losses, rel=1e-3)


def test_a_training_whose_model_could_not_be_saved_has_lost_no_step(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "SAVE_SECONDS", 0.0)
    start, rows, steps = tmp_path / "start", tokenize(tokenizer, SHORT), list[int]()
    save_model(model_of(tokenizer), tokenizer, start)
    options: dict[str, Any] = {"steps": 3, "batch_size": 2, "checkpoints": tmp_path / "kept"}
    options["on_step"] = lambda step, loss: steps.append(step)
    with monkeypatch.context() as full:
        full.setattr(sft, "save_model", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            fine_tune(start, tmp_path / "to", rows, **options)
    fine_tune(start, tmp_path / "to", rows, **options)
    assert steps == [1, 2, 3] and (tmp_path / "to").is_dir() and not (tmp_path / "kept").exists()


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from dreamgym_lg.integrations.trl import sft
from dreamgym_lg.integrations.trl.rows import tokenize
from dreamgym_lg.integrations.trl.sft import fine_tune, save_model

start, to, rng = Path(sys.argv[1]) / "start", Path(sys.argv[1]) / "to", random.Random(0)
talk = [{"role": "user", "content": "a plum"}, {"role": "assistant", "content": "blue"}]

def load(path):
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)

def forked(work):  # this process itself only forks: a lock held by a killed child must be nobody else's
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid

def check():
    model, tokenizer = load(to)
    os._exit(0 if "generation" in tokenizer.chat_template else 1)

for kill in range(6):
    ready, begun = os.pipe()
    def save():
        model, tokenizer = load(start)
        os.write(begun, b"x")
        while True:
            save_model(model, tokenizer, to)
    def tune():
        os.write(begun, b"x")
        while True:
            fine_tune(start, to, tokenize(load(start)[1], [talk]), steps=1, learning_rate=1e-3)
    pid = forked(save if kill % 3 else tune)
    os.read(ready, 1)
    time.sleep(rng.uniform(0.05, 0.3))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    whole = to.exists() and os.waitpid(forked(check), 0)[1] == 0
    print("whole" if whole else "broken" if to.exists() else "none", flush=True)
"""


@pytest.mark.slow
def test_a_saved_model_is_read_with_its_own_tokenizer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """For some architectures `AutoTokenizer` splits text in the way of the architecture's first model."""
    save_model(model_of(tokenizer), tokenizer, tmp_path / "model")
    text = 'valid, it is\nthe colour red 12345 {"name": "料理"}'
    assert AutoTokenizer.from_pretrained(tmp_path / "model")(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.slow
def test_a_kill_leaves_a_whole_folder_or_none(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_model(model_of(tokenizer), tokenizer, tmp_path / "start")
    done = subprocess.run([sys.executable, "-c", KILLER, tmp_path], capture_output=True, text=True, timeout=100)
    states = done.stdout.split()
    assert len(states) == 6, done.stderr[-2000:]
    assert "whole" in states and "broken" not in states
    save_model(model_of(tokenizer), tokenizer, tmp_path / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start", "to"], "what a kill left is cleared away"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "to") and AutoTokenizer.from_pretrained(tmp_path / "to")


@pytest.mark.parametrize(
    ("has", "bf16"),
    [("amx_bf16", True), ("avx512_bf16", True), ("avx512_f", False)],
)
def test_a_cpu_that_multiplies_bfloat16_trains_in_it(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, has: str, bf16: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {has: True})
    computed = set[torch.dtype]()
    model = model_of(tokenizer)
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, __, output: computed.add(output.dtype))

    train_sft(model, tokenize(tokenizer, SHORT), steps=1)

    assert computed == {torch.bfloat16 if bf16 else torch.float32}
    assert model(torch.tensor([[5]])).logits.dtype == model.dtype == torch.float32, "the training is over"
    monkeypatch.setattr(sft, "precision", lambda *_, **__: {"bf16": not bf16})
    train_sft(model, tokenize(tokenizer, SHORT), steps=1)
    assert computed == {torch.bfloat16, torch.float32}, "the next one computes as it is told"


def test_rows_are_padded_to_lengths_that_repeat_and_to_no_more_than_the_model_takes(tokenizer: PreTrainedTokenizerFast) -> None:
    def shape(lengths: Sequence[int], longest: int) -> tuple[int, ...]:
        model = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=longest)
        trainer = TokenTrainer(model, StepOptions(learning_rate=1e-3), micro_batch_tokens=2048, multiple=64)
        own = [Segment(token_ids=[5] * n, sampled=[0] + [1] * (n - 1), logprobs=[0.0] * n) for n in lengths]
        batch = trainer.batch([TrainingRow(each, [0.0] * len(each.token_ids), 1.0) for each in own])
        assert {tuple(each.shape) for each in batch[:3]} == {tuple(batch.ids.shape)}
        assert batch.mask.sum(dim=1).tolist() == list(lengths)
        return tuple(batch.ids.shape)

    assert shape([3, 65], 1000) == (2, 128)
    assert shape([3, 65], 100) == (2, 100)
    assert shape([64], 1000) == (1, 64)


def test_a_conversation_longer_than_the_model_is_learned_and_watched_as_far_as_it_can_be_read(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = tokenize(tokenizer, [conversation("apple") * 40])[0]
    short = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=64)
    short.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    sizes = list[int]()
    batch = TokenTrainer.batch

    def noted(self: TokenTrainer, rows: Any) -> Any:
        sizes.append(len(rows[0].segment.token_ids))
        return batch(self, rows)

    monkeypatch.setattr(TokenTrainer, "batch", noted)
    fine_tune(tmp_path / "start", tmp_path / "out", [row], steps=1, batch_size=1, held_out=[row])
    assert len(row.segment.token_ids) > 64 and sizes and set(sizes) == {64}
    assert "1 of 1 conversations are longer than the model's 64 tokens and are learned up to there" in caplog.text
