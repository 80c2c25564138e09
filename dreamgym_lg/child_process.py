"""Processes of this library's own beside this one: pickled messages over standard input and output.

A child runs `main(requests, replies)`, two binary files, of a module or a file. It is killed with its user. Once its parent is
gone, its reading ends with `EOFError` and its sending with `BrokenPipeError`. A pickle can run code: a process that is not
trusted speaks JSON instead (`simulate.wall`).
"""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from dreamgym_lg.errors import ProcessLost

_CODE = """
import os, runpy, sys
requests, replies = os.dup(0), os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)  # what a library prints is no reply
place = sys.argv.pop()
run = runpy.run_path if place.endswith(".py") else lambda name: vars(__import__(name, fromlist=["main"]))
run(place)["main"](os.fdopen(requests, "rb"), os.fdopen(replies, "wb"))
"""


class Pipes:
    """One end of the conversation with another process: sends from any thread, receives in one."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader, self._writer, self._sending = reader, writer, threading.Lock()

    def send(self, message: object) -> None:
        """Send a message whole or not at all. Raises `OSError` where the other process has ended."""
        pickled = pickle.dumps(message)
        with self._sending:
            self._writer.write(pickled)
            self._writer.flush()

    def receive(self) -> Any:
        """The next message. Raises `EOFError` where the other process has ended.

        `pickle.UnpicklingError`: it ended within a message.
        """
        return pickle.load(self._reader)


class Child:
    """A child process that runs this library's code. `kill` ends it, as does the end of this object or of this process.

    ```python
    child = Child("package.module", name="the process of the game")  # def main(requests, replies): ...
    child.ask({"action": "look"})  # what its main sends back
    ```

    Args:
        main: The dotted name of the module, or the path of the file, that has `main`. A file is run without this library.
        name: What it is, for `ProcessLost`.
        advice: What to do about its end.
        environment: Variables that it has besides this process's.
        patience: Seconds it may take to end by itself, once its input has ended, before it is killed.
        stderr: As of `subprocess.Popen`.
    """

    def __init__(
        self,
        main: str | Path,
        *,
        name: str,
        advice: str = "",
        environment: Mapping[str, str] | None = None,
        patience: float = 0.0,
        stderr: BinaryIO | None = None,
    ) -> None:
        self._name, self._advice, self._asking = name, advice, threading.Lock()
        python_path = os.pathsep.join(str(path) or os.getcwd() for path in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, str(main)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is for the parent, whose episodes still ask while they come to their end
            # threads that wait leave the cores to this process, which may compute at the same time
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": python_path, **(environment or {})},
        )
        self._pipes = Pipes(cast(BinaryIO, self.process.stdout), cast(BinaryIO, self.process.stdin))
        self.kill = weakref.finalize(self, _stop, self.process, patience)

    def send(self, message: object) -> None:
        """Raises `ProcessLost` where the process has ended."""
        try:
            self._pipes.send(message)
        except (OSError, ValueError) as error:  # ValueError: the pipe is closed
            raise self._lost() from error

    def receive(self) -> Any:
        """The next message. Raises it where it is an exception, and `ProcessLost` where the process has ended."""
        return _raise_if_error(self._receive())

    def ask(self, message: object, *, timeout: float | None = None) -> Any:
        """Send a message and return the reply, for one caller after the other. Raises as `receive` does.

        The process is killed where no reply comes within `timeout` seconds, or where the caller is interrupted.
        """
        with self._asking:
            timer = threading.Timer(timeout or 0.0, self.process.kill)
            if timeout is not None:
                timer.start()
            try:
                self.send(message)
                reply = self._receive()
            except BaseException:
                self.kill()  # its reply would be taken for that to the next message
                raise
            finally:
                timer.cancel()
        return _raise_if_error(reply)

    def _receive(self) -> Any:
        try:
            return self._pipes.receive()
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise self._lost() from error

    def _lost(self) -> ProcessLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1)  # its pipes close a moment before it has a status
        self.kill()
        return ProcessLost(
            f"{self._name} has ended (status {self.process.wait()}: -9 may be a lack of memory)"
            + (f"; {self._advice}" if self._advice else "")
        )


def _raise_if_error(message: Any) -> Any:
    if isinstance(message, BaseException):
        raise message
    return message


def _stop(process: "subprocess.Popen[bytes]", patience: float) -> None:
    requests, replies = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
    if patience:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            requests.close()
            process.wait(timeout=patience)
    process.kill()
    process.wait()
    for pipe in (requests, replies):
        with contextlib.suppress(OSError, RuntimeError):  # what could not be sent any more; a thread that reads
            pipe.close()
