"""One event loop for all that this library plays.

The async clients of providers, and those of a user's own tools, keep connections that no other loop can use: with a loop of
its own, the second evaluation of the same agent finds them closed.
"""

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")

_starting = threading.Lock()
_LONGEST_GOODBYE = 10.0
"""Seconds for which what was cancelled may tidy up."""


@cache
def _started(name: str) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


def lasting_loop(name: str) -> asyncio.AbstractEventLoop:
    """The loop of this name, in a thread of its own, which runs as long as the process does."""
    with _starting:
        return _started(name)


def run_lasting(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` in the loop of all episodes; also where another loop runs, as in a notebook.

    The caller's context variables are seen inside. An interrupted caller (Ctrl-C) cancels what it waits for.
    """
    done = threading.Event()

    async def work() -> Result:
        try:
            return await coroutine
        finally:
            done.set()

    future = asyncio.run_coroutine_threadsafe(work(), lasting_loop("dreamgym-episodes"))
    try:
        return future.result()
    except BaseException:
        if not future.done():
            future.cancel()
            done.wait(_LONGEST_GOODBYE)
        raise
