"""The token recorder: every sampled token once, as it was sampled, in the episode that sampled it."""

import asyncio
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from dreamgym_lg.token_recorder import TokenCall, TokenRecorder, unrecorded
from dreamgym_lg.types import Segment


def call(given: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> TokenCall:
    return TokenCall(None, given, sampled, [-0.01 * token for token in sampled], temperature)


def segments(*calls: TokenCall) -> list[Segment]:
    recorder = TokenRecorder()
    for each in calls:
        recorder.record(each)
    return recorder.segments()


def test_a_context_that_only_grows_is_one_segment() -> None:
    (found,) = segments(call([1, 2], [3]), call([1, 2, 3, 4], [5, 6]), call([1, 2, 3, 4, 5, 6, 7, 8], [9]))
    assert found.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert found.sampled == [0, 0, 1, 0, 1, 1, 0, 0, 1]
    assert found.logprobs == [0.0, 0.0, -0.03, 0.0, -0.05, -0.06, 0.0, 0.0, -0.09]
    assert found.trainable == 4


def test_a_next_call_may_follow_without_a_given_token_between() -> None:
    (found,) = segments(call([1], [2]), call([1, 2], [3]))
    assert (found.token_ids, found.sampled) == ([1, 2, 3], [0, 1, 1])


def test_an_edited_context_begins_a_segment_that_can_itself_be_continued() -> None:
    found = segments(call([1, 2], [3]), call([1, 9], [4]), call([1, 9, 4, 5], [6]))
    assert [(s.token_ids, s.sampled) for s in found] == [
        ([1, 2, 3], [0, 0, 1]),
        ([1, 9, 4, 5, 6], [0, 0, 1, 0, 1]),
    ]


def test_a_shortened_context_begins_a_segment() -> None:
    found = segments(call([1, 2, 3], [4]), call([1, 2], [5]), call([1, 2, 3], [4]))
    assert [s.token_ids for s in found] == [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4]]


def test_fan_out_gives_a_segment_to_each_branch_and_each_is_continued() -> None:
    branches = [call([1, 2], [3]), call([1, 2], [4])]
    found = segments(*branches, call([1, 2, 4, 7], [8]), call([1, 2, 3, 5], [6]))
    assert [s.token_ids for s in found] == [[1, 2, 3, 5, 6], [1, 2, 4, 7, 8]]


def test_a_segment_has_one_temperature() -> None:
    """A call at another one reads the tokens before it and adds none to their segment."""
    found = segments(call([1], [2]), call([1, 2], [3], 0.0), call([1, 2, 3], [4]), call([1, 2, 3, 5], [6], 0.0))
    assert [(s.temperature, s.token_ids, s.sampled) for s in found] == [
        (1.0, [1, 2, 3, 4], [0, 1, 0, 1]),
        (0.0, [1, 2, 3, 5, 6], [0, 0, 1, 0, 1]),
    ]


def test_the_longest_segment_that_fits_is_continued() -> None:
    found = segments(call([1, 2], [3]), call([1, 2], [3, 4]), call([1, 2, 3, 4, 5], [6]))
    assert [s.token_ids for s in found] == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]


def test_calls_without_a_sampled_token_leave_no_trace() -> None:
    assert segments() == segments(call([1, 2], [])) == []
    (found,) = segments(call([1, 2], []), call([1, 2], [3]), call([1, 2, 3, 4], []), call([1, 2, 3, 4], [5]))
    assert (found.token_ids, found.trainable) == ([1, 2, 3, 4, 5], 2)


@pytest.mark.parametrize("seed", range(30))
def test_any_agent_keeps_every_sampled_token_exactly_once_behind_what_it_read(seed: int) -> None:
    # Two tokens only, so that contexts collide; an agent continues, shortens or edits one of its earlier contexts.
    rng, contexts, calls = random.Random(seed), [[0]], []
    for _ in range(12):
        given = list(rng.choice(contexts))
        if rng.random() < 0.4:
            given = given[: rng.randint(1, len(given))]
        given += rng.choices([0, 1], k=rng.randint(0, 2))
        sampled = rng.choices([0, 1], k=rng.randint(0, 3))
        calls.append(call(given, sampled))
        contexts.append(given + sampled)
    found = segments(*calls)
    assert sum(s.trainable for s in found) == sum(len(each.sampled_ids) for each in calls)
    assert all(len(s.token_ids) == len(s.sampled) == len(s.logprobs) for s in found)
    for given, sampled in ((list(each.prompt_ids), list(each.sampled_ids)) for each in calls if each.sampled_ids):
        whole, end = given + sampled, len(given) + len(sampled)
        assert any(s.token_ids[:end] == whole and s.sampled[len(given) : end] == [1] * len(sampled) for s in found)


def test_the_current_recorder_is_that_of_the_innermost_block() -> None:
    outer, inner = TokenRecorder(), TokenRecorder()
    assert TokenRecorder.current() is None
    with outer:
        with inner, outer:
            assert TokenRecorder.current() is outer
        assert TokenRecorder.current() is outer
        with pytest.raises(ZeroDivisionError), inner:
            assert TokenRecorder.current() is inner
            _ = 1 / 0
        assert TokenRecorder.current() is outer
    assert TokenRecorder.current() is None


def test_unrecorded_calls_belong_to_no_episode() -> None:
    with TokenRecorder() as recorder:
        with pytest.raises(ZeroDivisionError), unrecorded():
            assert TokenRecorder.current() is None
            _ = 1 / 0
        assert TokenRecorder.current() is recorder


async def test_concurrent_tasks_record_apart_and_their_own_tasks_and_threads_with_them() -> None:
    everyone_inside = asyncio.Barrier(10)

    def report(token: int) -> None:
        recorder = TokenRecorder.current()
        assert recorder is not None
        recorder.record(call([0], [token]))

    async def later(token: int) -> None:
        report(token)

    async def episode(number: int) -> TokenRecorder:
        with TokenRecorder() as recorder:
            await everyone_inside.wait()
            report(number)
            await asyncio.create_task(later(100 + number))
            await asyncio.to_thread(report, 200 + number)
        return recorder

    recorders = await asyncio.gather(*map(episode, range(10)))
    assert TokenRecorder.current() is None
    for number, recorder in enumerate(recorders):
        assert [each.sampled_ids for each in recorder.calls] == [[number], [100 + number], [200 + number]]


def test_a_thread_sees_the_recorder_only_in_a_copy_of_the_context() -> None:
    with TokenRecorder() as recorder, ThreadPoolExecutor(1) as pool:
        assert pool.submit(TokenRecorder.current).result() is None
        assert pool.submit(copy_context().run, TokenRecorder.current).result() is recorder


def test_threads_may_share_a_recorder() -> None:
    recorder, start = TokenRecorder(seed=1), threading.Barrier(8)

    def work(thread: int) -> list[int | None]:
        start.wait()
        for index in range(100):
            recorder.record(call([thread], [index]))
        return [recorder.next_seed() for _ in range(100)]

    with ThreadPoolExecutor(8) as pool:
        seeds = [seed for drawn in pool.map(work, range(8)) for seed in drawn]
    assert len(recorder.calls) == 800 and len(set(seeds)) == 800


def test_seeds_follow_from_the_episode_seed_and_the_number_of_the_call_alone() -> None:
    def drawn(seed: int | None) -> list[int | None]:
        recorder = TokenRecorder(seed=seed)
        return [recorder.next_seed() for _ in range(50)]

    assert drawn(7) == drawn(7)
    assert len({*drawn(7), *drawn(8), *drawn(0)}) == 150
    assert all(seed is not None and 0 <= seed < 2**63 for seed in drawn(2**40 - 1))
    assert drawn(None) == [None] * 50
