"""Event loops that outlive each call, as async clients' connections need."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")

_start_lock, _runner_lock = threading.Lock(), threading.Lock()


def run_lasting(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` in the caller's thread, but in one lasting loop unless that is busy."""
    if asyncio._get_running_loop() is not None:
        again: Any = run_lasting  # mypy loses the type of a function within itself
        with ThreadPoolExecutor(1) as beside:
            result: Result = beside.submit(copy_context().run, again, coroutine).result()
            return result
    if not _runner_lock.acquire(blocking=False):
        return asyncio.run(coroutine)
    try:
        return _runner().run(coroutine, context=copy_context())
    finally:
        _cancel_rest(_runner().get_loop())
        _runner_lock.release()


def lasting_loop(name: str) -> asyncio.AbstractEventLoop:
    """The loop of this name, in a thread of its own."""
    with _start_lock:
        return _running_loop(name)


def wait_in_loop(name: str, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine in the lasting loop of this name.

    Raises `RuntimeError` inside that loop itself, which would wait for ever.
    """
    loop = lasting_loop(name)
    if asyncio._get_running_loop() is loop:
        coroutine.close()
        raise RuntimeError(f"synchronous code in the event loop {name!r} waits for that loop: call the async method there")
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def finish_in_loop(name: str) -> None:
    """Wait until nothing runs in the lasting loop of this name."""

    async def rest() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*tasks, return_exceptions=True)

    wait_in_loop(name, rest())


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


@cache
def _running_loop(name: str) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


def _cancel_rest(loop: asyncio.AbstractEventLoop) -> None:
    """End the tasks that a coroutine left behind, as `asyncio.run` does."""
    if left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


def _reset_in_child() -> None:
    """Begin anew in a forked child, which has neither the threads nor the loops."""
    global _start_lock, _runner_lock
    _start_lock, _runner_lock = threading.Lock(), threading.Lock()
    _runner.cache_clear()
    _running_loop.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_child)
