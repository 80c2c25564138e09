"""The one loop in which episodes are played."""

import asyncio
import contextvars
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dreamgym_lg.event_loop import lasting_loop, run_lasting

NAME = contextvars.ContextVar("name", default="")


async def here() -> tuple[asyncio.AbstractEventLoop, int]:
    return asyncio.get_running_loop(), threading.get_ident()


def test_it_is_the_same_loop_each_time_and_in_the_callers_thread() -> None:
    loop, thread = run_lasting(here())
    assert thread == threading.get_ident()
    with ThreadPoolExecutor(1) as pool:
        again, elsewhere = pool.submit(lambda: run_lasting(here())).result()
    assert again is loop is run_lasting(here())[0] and elsewhere != thread


async def test_it_can_be_waited_for_where_a_loop_runs() -> None:
    loop, _ = run_lasting(here())
    assert loop is not asyncio.get_running_loop() and run_lasting(here())[0] is loop


def test_what_is_played_inside_of_what_is_played_gets_a_loop_of_its_own() -> None:
    async def outer() -> tuple[asyncio.AbstractEventLoop, ...]:
        inside, _ = run_lasting(here())
        in_a_thread, _ = await asyncio.to_thread(lambda: run_lasting(here()))
        return asyncio.get_running_loop(), inside, in_a_thread

    assert len(set(map(id, run_lasting(outer())))) == 3


def test_context_variables_of_the_caller_are_seen() -> None:
    async def name() -> str:
        return NAME.get()

    token = NAME.set("the caller's")
    assert run_lasting(name()) == "the caller's"
    NAME.reset(token)
    assert run_lasting(name()) == ""


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_is_left_ends_with_what_raised(interrupted: bool) -> None:
    ended, played = [], []

    async def left() -> None:
        try:
            for _ in range(100):
                await asyncio.sleep(0.01)
                played.append(True)
        finally:
            ended.append(True)

    async def play() -> None:
        task = asyncio.create_task(left())
        await asyncio.sleep(0)
        if interrupted:
            signal.raise_signal(signal.SIGINT)
            await task
        raise KeyError("inside")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job begins with Ctrl-C ignored
    try:
        with pytest.raises(KeyboardInterrupt if interrupted else KeyError):
            run_lasting(play())
    finally:
        signal.signal(signal.SIGINT, before)
    run_lasting(asyncio.sleep(0.05))
    assert ended == [True] and len(played) < 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_loops_of_its_own() -> None:
    parents = run_lasting(here())[0]
    lasting_loop("test")
    child = os.fork()
    if child == 0:
        done = asyncio.run_coroutine_threadsafe(here(), lasting_loop("test"))
        os._exit(0 if run_lasting(here())[0] is not parents and done.result(10) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
