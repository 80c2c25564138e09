"""The program of a worker: it loads the agent and plays episodes whose policy and world are the parent's.

The episode itself is a `SimulatedAgent`, as in process; its policy and its environment ask the parent, over the pipe
(`remote_episode`). The agent and its options come first, and `{"ready": true}` or a failure goes back.
"""

import asyncio
import contextlib
import errno
import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from langchain_core.language_models import BaseChatModel

from dreamgym_lg.environment import Environment
from dreamgym_lg.errors import ConfigurationError, DreamGymError
from dreamgym_lg.simulate.agent import SimulatedAgent
from dreamgym_lg.simulate.guard_checks import Allow
from dreamgym_lg.simulate.loading import load_agent
from dreamgym_lg.simulate.remote_episode import (
    Message,
    Parent,
    ParentEnvironment,
    ParentPolicy,
    errors_behind,
    failure_of,
    play_episode,
    to_line,
)


def main() -> None:
    """Load the agent, then obey the parent until its orders end."""
    orders, write = os.fdopen(os.dup(0), "rb"), _writer(os.fdopen(os.dup(1), "wb"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the agent prints is no answer
    path, options = pickle.load(orders)
    try:
        graph, options = load_agent(path), _unpickled(options)
        allow = options["allow"] or Allow()
        options["allow"] = replace(allow, paths=[*allow.paths, os.environ["TMPDIR"]])  # the scratch folder of `start_walled`
    except Exception as error:
        failure = _failure(error)
        if _is_of_the_wall(error):
            failure["text"] += "; behind the wall nothing is written but what allow= names: do it in a tool, or allow it"
        return write(to_line(**failure))
    write(to_line(ready=True))
    loop = asyncio.new_event_loop()
    arguments = orders, write, loop, partial(SimulatedAgent, graph, **options)  # type: ignore[arg-type]
    threading.Thread(target=_obey, args=arguments, name="dreamgym-orders", daemon=True).start()
    while True:
        with contextlib.suppress(BaseException):  # SystemExit of an agent ends its episode alone
            loop.run_forever()


def _unpickled(options: bytes) -> dict[str, Any]:
    try:
        return dict(pickle.loads(options))
    except Exception as error:
        raise ConfigurationError(
            f"a worker cannot import the functions that it was given ({type(error).__name__}: {error}): let them be of a "
            "module that can be imported without touching anything, such as the agent's own, or take isolation='guard'"
        ) from error


def _writer(pipe: BinaryIO) -> Callable[[bytes], None]:
    """Writes lines, by any thread."""
    lock = threading.Lock()

    def write(line: bytes) -> None:
        with lock:
            pipe.write(line)
            pipe.flush()

    return write


def _obey(
    orders: BinaryIO,
    write: Callable[[bytes], None],
    loop: asyncio.AbstractEventLoop,
    create: Callable[[BaseChatModel], SimulatedAgent],
) -> None:
    def create_both(parent: Parent, first: str) -> tuple[SimulatedAgent, Environment]:
        return create(ParentPolicy(parent=parent, cache=False)), ParentEnvironment(parent, first)

    parents: dict[int, Parent] = {}
    with contextlib.suppress(EOFError):
        while True:
            order, number, *rest = pickle.load(orders)
            if order == "play":
                parents = {number: parent for number, parent in parents.items() if not parent.ended}
                parents[number] = parent = Parent(write, number)
                task, first = rest
                playing = play_episode(parent, task, partial(create_both, parent, first), failure=_failure)
                loop.call_soon_threadsafe(partial(loop.create_task, playing, context=Context()))
            elif number in parents:
                parents[number].answer(*rest)
    os.killpg(0, signal.SIGKILL)  # with the children, and threads of the agent that may run for ever


def _failure(error: BaseException) -> Message:
    """`failure_of`, which tells the wall's refusals from others."""
    failure, refused = failure_of(error), any(map(_is_of_the_wall, errors_behind(error)))
    if failure["number"] is None and not isinstance(error, DreamGymError) and refused:
        text = f"the wall stopped {type(error).__name__}: {error}; allow it with allow=, or simulate it"
        failure |= {"failed": "AccessBlocked", "text": text}
    return failure


def _is_of_the_wall(error: BaseException) -> bool:
    """Tells if this is how the kernel's refusal reaches Python; native libraries have it in the text alone."""
    refusals = (os.strerror(errno.EACCES), os.strerror(errno.EPERM), "readonly database")  # the last is SQLite's
    return isinstance(error, PermissionError) or any(text.lower() in str(error).lower() for text in refusals)
