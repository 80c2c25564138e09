"""The one loop in which episodes are played."""

import asyncio
import contextvars
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dreamgym_lg.loops import run_lasting

NAME = contextvars.ContextVar("name", default="")


async def here() -> tuple[asyncio.AbstractEventLoop, str]:
    return asyncio.get_running_loop(), NAME.get()


def test_it_is_the_same_loop_each_time_and_from_every_thread() -> None:
    with ThreadPoolExecutor(4) as pool:
        loops = {loop for loop, _ in [run_lasting(here()), *pool.map(lambda _: run_lasting(here()), range(8))]}
    assert len(loops) == 1


async def test_it_can_be_waited_for_where_a_loop_runs() -> None:
    loop, _ = run_lasting(here())
    assert loop is not asyncio.get_running_loop()


def test_context_variables_of_the_caller_are_seen() -> None:
    token = NAME.set("the caller's")
    assert run_lasting(here())[1] == "the caller's"
    NAME.reset(token)
    assert run_lasting(here())[1] == ""


def test_what_is_raised_inside_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        run_lasting(fail())


def test_an_interrupt_cancels_what_is_waited_for_and_lets_it_tidy_up() -> None:
    tidied = []

    async def play() -> None:
        threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            tidied.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_lasting(play())
    assert tidied == [True]
