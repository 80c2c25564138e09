"""A process of this library's own beside this one: objects are pickled over its standard input and output.

It is killed with its user, and ends where its parent was killed: its input ends then, and what it says is a broken pipe.
"""

import contextlib
import os
import pickle
import subprocess
import sys

_CODE = """
import os
given, sent = os.dup(0), os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)  # what a library prints is no reply
from {module} import main
main(os.fdopen(given, "rb"), os.fdopen(sent, "wb"))
"""


def start_child(module: str, **environment: str) -> "subprocess.Popen[bytes]":
    """Start a process that calls `main(requests, replies)` of a module, two binary files.

    Args: `environment`, variables of its environment.
    """
    python_path = os.pathsep.join(str(path) or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE.format(module=module)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the parent, whose episodes still ask while they come to their end
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": python_path, **environment},
    )


def end_child(child: "subprocess.Popen[bytes]") -> None:
    """Kill the process: it has nothing to save."""
    child.kill()
    child.wait()
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()


def portable(error: BaseException) -> BaseException:
    """The error, or its text where it cannot be pickled and read again: that would end the reader."""
    try:
        same: BaseException = pickle.loads(pickle.dumps(error))
        return same
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
