"""Guessed tokens change no reply: they are what the model says anyway, or are dropped."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from dreamgym_lg.integrations.transformers import batch as transformers_batch
from dreamgym_lg.integrations.transformers import drafts as transformers_drafts
from dreamgym_lg.integrations.transformers import engine as transformers_engine
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.drafts import Drafts
from dreamgym_lg.integrations.transformers.engine import LocalEngine
from dreamgym_lg.integrations.transformers.requests import Request
from dreamgym_lg.token_recorder import TokenCall, TokenRecorder

Guess = Callable[[Drafts, list[int], int], list[int]]


def none(_: Drafts, ids: list[int], most: int) -> list[int]:
    return []


def wrong(_: Drafts, ids: list[int], most: int) -> list[int]:
    return [(ids[-1] + 7 * place) % 300 for place in range(most)]


def half_right(drafts: Drafts, ids: list[int], most: int) -> list[int]:
    guessed = _guess(drafts, ids, most)
    return [token if place < 2 else 5 for place, token in enumerate(guessed)]


_guess = Drafts.guess


@pytest.fixture
def guess(monkeypatch: pytest.MonkeyPatch) -> Callable[[Guess], None]:
    return lambda chosen: monkeypatch.setattr(Drafts, "guess", chosen)


async def episodes(policy: LocalChatModel, opening: Callable[[int], list[BaseMessage]]) -> list[TokenRecorder]:
    """Twelve conversations of three turns, the second six like the first: what they say has been said before.

    Their calls share batches: greedy and sampled, streamed or not, of many lengths, some with a string that ends them.
    """

    async def one(i: int) -> TokenRecorder:
        asked = policy.with_temperature(0) if i % 6 == 4 else policy
        with TokenRecorder(seed=i % 6) as recorder:
            messages = opening(i % 6)
            for turn in range(3):
                options: dict[str, Any] = {"max_new_tokens": 4 + 3 * (i % 3 + turn), "stop": ["ki"] if i % 2 else []}
                if i % 6 == 5:
                    pieces = [chunk.text async for chunk in asked.astream(messages, **options)]
                    reply: BaseMessage = AIMessage("".join(pieces))
                else:
                    reply = await asked.ainvoke(messages, **options)
                messages += [reply, HumanMessage("then?")]
        return recorder

    return [recorder for half in (range(6), range(6, 12)) for recorder in await asyncio.gather(*map(one, half))]


def calls(recorders: list[TokenRecorder]) -> Iterator[TokenCall]:
    return (call for recorder in recorders for call in recorder.calls)


def reads(policy: LocalChatModel) -> list[int]:
    """Of every pass from now on, how many tokens of a reply it reads: the last one and those guessed."""
    decoder, read = policy.engine._decoder, []
    forward = decoder.forward

    def counted(cache: Any, positions: int = 1, **inputs: Any) -> Any:
        read.append(positions)
        return forward(cache, positions, **inputs)

    decoder.forward = counted
    return read


@pytest.mark.parametrize("chosen", [_guess, wrong, half_right], ids=["as it is", "wrong", "half right"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_guess_changes_no_reply(
    policy: LocalChatModel,
    guess: Callable[[Guess], None],
    chosen: Guess,
    temperature: float,
    opening: Callable[[int], list[BaseMessage]],
    forward_error: Callable[..., float],
) -> None:
    policy = policy.with_temperature(temperature)
    guess(none)
    plain = list(calls(await episodes(policy, opening)))
    policy.weights_changed()
    guess(chosen)
    recorders = await episodes(policy, opening)
    for call, expected in zip(calls(recorders), plain, strict=True):
        assert (call.sampled_ids, call.given_ids) == (expected.sampled_ids, expected.given_ids)
        assert call.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert max(forward_error(policy, recorder.segments()[0]) for i, recorder in enumerate(recorders) if i % 6 != 4) < 1e-4
    assert {len(recorder.segments()) for recorder in recorders} == {1}


@pytest.mark.parametrize(("limit", "value"), [("ROOM", 0), ("ROOM", 3), ("LOGITS", 0), ("MOST_GUESSED", 0)])
async def test_a_limit_of_guesses_changes_no_reply(
    policy: LocalChatModel,
    guess: Callable[[Guess], None],
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
    opening: Callable[[int], list[BaseMessage]],
) -> None:
    guess(none)
    expected = await policy.ainvoke(opening(1), seed=1, max_new_tokens=40)
    monkeypatch.setattr(transformers_batch, limit, value)
    for chosen in (wrong, _guess):
        guess(chosen)
        assert (await policy.ainvoke(opening(1), seed=1, max_new_tokens=40)).text == expected.text


def test_no_position_is_beyond_the_models_last(
    tokenizer: PreTrainedTokenizerFast, guess: Callable[[Guess], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long conversation shares a pass with a short one whose reply has more to come: what is guessed there pads it."""
    monkeypatch.setattr(transformers_engine, "IDLE_SECONDS", 0.1)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=1, n_head=2)
    engine = LocalEngine(GPT2LMHeadModel(config), tokenizer)
    guess(wrong)
    short = [{"role": "user", "content": "hm"}]
    texts = ("the kitchen " * 18 + " hm" * more for more in range(30))
    long = next(
        asked
        for asked in ([{"role": "user", "content": text}] for text in texts)
        if len(engine.prefixes.encode(tokenizer, Request(asked), 1000)[1]) == 62
    )
    futures = [engine.submit(Request(long, max_new_tokens=2, seed=0)), engine.submit(Request(short, max_new_tokens=40, seed=0))]
    assert [len(future.result(30).sampled_ids) for future in futures] == [2, 40]


def test_a_large_vocabulary_leaves_little_to_guess(
    policy: LocalChatModel, opening: Callable[[int], list[BaseMessage]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_batch, "LOGITS", 2 * 320)
    assert policy.engine._decoder.vocabulary == 320
    read = reads(policy)
    for _ in range(2):
        policy.invoke(opening(1), seed=1, max_new_tokens=20)
        policy.weights_changed()
    assert max(read) == 2


def test_a_row_whose_guesses_are_wrong_is_not_guessed_until_one_would_be_right(
    policy: LocalChatModel, opening: Callable[[int], list[BaseMessage]], guess: Callable[[Guess], None]
) -> None:
    said = policy.invoke(opening(1), seed=1, max_new_tokens=12)
    read = reads(policy)
    guess(wrong)
    assert policy.invoke(opening(1), seed=1, max_new_tokens=12).text == said.text
    assert read[0] > 1 and set(read[1:]) == {1}


def test_what_was_said_before_takes_few_passes(policy: LocalChatModel, opening: Callable[[int], list[BaseMessage]]) -> None:
    first = policy.invoke(opening(1), seed=1, max_new_tokens=60)
    policy.weights_changed()
    before = len(policy.engine.passes)
    said = policy.invoke(opening(1), seed=1, max_new_tokens=60)
    assert said.text == first.text
    assert before == 60 and len(policy.engine.passes) - before < 10


def test_guesses_are_what_followed_the_longest_known_beginning() -> None:
    drafts = Drafts()
    drafts.learn([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0)
    assert drafts.guess([3, 4, 5, 6, 7, 8], 9) == [9, 10]
    drafts.learn([0, 0, 3, 4, 20, 21], 0)
    assert drafts.guess([3, 4], 9) == [20, 21]
    assert drafts.guess([1, 2, 3, 4], 2) == [5, 6]
    assert drafts.guess([4, 3], 9) == [] == drafts.guess([], 9) == drafts.guess([3, 4], 0) == drafts.guess([3, 4], -1)


def test_what_is_learned_already_is_not_learned_again() -> None:
    drafts = Drafts()
    drafts.learn([1, 2, 3, 4], 3)
    assert drafts.guess([1, 2], 9) == [] and drafts.guess([2, 3], 9) == [4]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_drafts, "REMEMBERED", 100)
    drafts = Drafts()
    for start in range(0, 1000, 10):
        drafts.learn(range(start, start + 10), 0)
        assert len(drafts._next) < 200


def test_nothing_is_guessed_behind_the_end_of_a_reply() -> None:
    drafts = Drafts({4})
    drafts.learn([1, 2, 3, 4, 5, 6], 0)
    assert drafts.guess([1, 2], 9) == [3, 4]
