"""Reads from plain code, which a dream really runs, where it touches the world."""

import dis
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from langgraph.pregel import Pregel

from dreamgym_lg.simulate.object_graph import codes, run_by, run_codes
from dreamgym_lg.simulate.user_code import of_library, users

# --- what the guard stops ---------------------------------------------------------------------------------------------------

_REACHING = {
    *("socket", "ssl", "requests", "httpx", "aiohttp", "websockets", "subprocess", "shutil", "tempfile"),
    *("smtplib", "imaplib", "ftplib", "boto3", "psycopg", "psycopg2", "asyncpg", "pymysql", "pymongo", "redis"),
    *("sqlalchemy", "sqlite3", "paramiko", "openai", "anthropic", "webbrowser", "pty", "urllib.request"),
    *("http.client", "http.server", "botocore", "urllib3", "pycurl"),
}
"""Modules that plain code reaches the world with; the guard sees all of them open files and connections."""
_HARMLESS = (
    *("shutil.which", "shutil.get_terminal_size", "shutil.disk_usage", "tempfile.gettempdir", "socket.gethostname"),
    *("sqlite3.Connection", "sqlite3.Cursor", "sqlite3.Row"),
)
"""Of those, what no guard stops; an open connection is a part of its own."""
_OF_OS = {
    *("remove", "unlink", "rename", "renames", "replace", "rmdir", "removedirs", "mkdir", "makedirs"),
    *("truncate", "link", "symlink", "chmod", "chown", "utime", "mkfifo", "mknod", "system", "popen", "fork"),
    *("forkpty", "kill", "killpg", "startfile", "fchmod", "fchown", "lchown", "ftruncate", "posix_fallocate"),
    *("setxattr", "removexattr", "splice", "copy_file_range", "sendfile", "write", "writev", "pwrite", "pwritev"),
}
_STARTING_PROCESSES = (
    *("multiprocessing.Process", "multiprocessing.process.", "multiprocessing.pool.Pool", "multiprocessing.shared_memory"),
    *("multiprocessing.util.spawnv_passfds", "concurrent.futures.process"),
)
_OF_SIGNALS = {"raise_signal", "pidfd_send_signal", "pthread_kill"}
_OF_FILES = {"open", "ZipFile", "TarFile", "GzipFile"}
_OF_ASYNCIO = {"open_connection", "open_unix_connection", "start_server", "create_subprocess_exec", "create_subprocess_shell"}
_OF_PATHS = {"write_text", "write_bytes", "unlink", "mkdir", "rmdir", "touch", "symlink_to", "hardlink_to", "rmtree"}


def touched(function: types.FunctionType) -> list[str]:
    """The names in a function's code that the guard stops, dotted: `os.remove`, `.write_text`."""
    names = list(_names(function, run_codes(function)))
    native_loop = any(name.startswith("uvloop.") for name, _ in names)  # its connections are none of asyncio's
    return sorted({n for n, writes in names if _reaches(n, writes) and not (native_loop and n.startswith("asyncio."))})


def _reaches(name: str, writes: bool) -> bool:
    root, _, rest = name.partition(".")
    last = name.rpartition(".")[2]
    if name.startswith(_HARMLESS) or last.endswith(("Error", "Exception")):
        return False
    if root in ("os", "posix", "nt"):
        return rest in _OF_OS or rest.startswith(("exec", "spawn", "posix_spawn")) or (rest == "open" and writes)
    if root in _REACHING or ".".join(name.split(".")[:2]) in _REACHING:
        return True
    if root == "asyncio":
        return last in _OF_ASYNCIO
    if root in ("signal", "multiprocessing", "concurrent"):
        return last in _OF_SIGNALS or name.startswith(_STARTING_PROCESSES)
    return name == "input" or (last in _OF_FILES and writes) or ("." in name and last in _OF_PATHS)


# --- what nothing tells -----------------------------------------------------------------------------------------------------

_BELOW_PYTHON = {"ctypes", "_ctypes", "cffi", "fcntl", "readline", "resource", "dbm", "shelve", "mmap", "_posixshmem"}
"""Modules that reach the system below Python, or files by others; what they do there, code does not show."""
_UNSEEN = (
    *("__import__", "importlib.import_module", "exec", "eval", "logging.FileHandler", "logging.handlers."),
    *("os.sched_set", "os.setpriority", "os.pidfd_"),
)
_WRITING_ARRAYS = {"save", "savez", "savez_compressed", "savetxt", "memmap", "tofile", "dump"}
_KNOWN = ("langchain", "langgraph", "deepagents", "pydantic", "typing_extensions", "numpy", "dreamgym_lg")
"""Beginnings of packages that act on nothing but what they are given, or that an episode answers for."""
_HANDING_ON = ("queue.", "asyncio.queues.", "multiprocessing.queues.", "multiprocessing.connection.")
_KEEPING = {"append", "add", "update", "pop", "remove", "insert", "extend", "clear", "setdefault", "discard", "popitem"}


def unclear(function: types.FunctionType) -> list[str]:
    """The names in a function's code of which nothing tells what they do, dotted.

    That are other packages, calls below Python, queues that others read, and changes of what is kept outside of the function.
    """
    names = _names(function, run_codes(function))
    return sorted({name for name, writes in names if _is_unclear(name) and not _reaches(name, writes)})


def _is_unclear(name: str) -> bool:
    root, _, rest = name.partition(".")
    last = name.rpartition(".")[2]
    if name.startswith(_HANDING_ON):
        return last.startswith(("put", "send"))
    if root in _BELOW_PYTHON or name.startswith(_UNSEEN):
        return True
    if root == "numpy" or last == "tofile":
        return last in _WRITING_ARRAYS
    if root in sys.stdlib_module_names or root.startswith(_KNOWN) or last.endswith(("Error", "Exception")):
        return False
    module = sys.modules.get(root)
    if module is None:  # not imported yet; or of a container of the user's, as classes and functions stand under their modules
        return bool(root) and (rest in _KEEPING or find_spec(root) is not None)  # a local variable has no name here
    return of_library(getattr(module, "__file__", None) or "")


# --- threads and contexts ---------------------------------------------------------------------------------------------------

_STARTING_THREADS = (
    *("threading.Thread", "threading.Timer", "_thread.start_new_thread", "concurrent.futures.thread."),
    "multiprocessing.pool.ThreadPool",
)
_LEAVING = ("contextvars.Context", "_contextvars.Context", "_thread.start_new_thread")


def leaves_episode(function: types.FunctionType) -> list[str]:
    """The names in a function's code that run other code outside of any episode."""
    return sorted({name for name, _ in _names(function, run_codes(function)) if name.startswith(_LEAVING)})


def nodes_with_own_threads(graph: Pregel) -> list[str]:
    """Names of the nodes whose own code starts threads or uses a pool, sorted."""
    return sorted(name for name, node in graph.nodes.items() if any(map(_starts_threads, run_by([node.bound, *node.writers]))))


def _starts_threads(value: Any) -> bool:
    """Tells if this is a thread, or code that starts one or uses a pool."""
    if not users(value):
        return isinstance(value, threading.Thread)
    names = (name for name, _ in _names(value, codes(value)))
    return any(name.startswith(_STARTING_THREADS) or name.endswith(".run_in_executor") for name in names)


# --- names ------------------------------------------------------------------------------------------------------------------

_MODE_DISTANCE = 12
"""Within so many instructions of `open` stands its mode, if it has one."""
_WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"}


def _names(function: types.FunctionType, parts: Iterable[types.CodeType]) -> Iterator[tuple[str, bool]]:
    """The names that code uses with their attributes, and whether a mode that writes follows.

    A module, class or object stands there under the name of its own module.
    """
    for code in parts:
        steps = list(dis.get_instructions(code))
        for end, name in _chains(function, steps):
            near = [step.argval for step in steps[end : end + _MODE_DISTANCE] if isinstance(step.argval, str)]
            if name == "sqlite3.connect" and ":memory:" in near and not _attaches(code):
                continue
            yield name, any(_is_writing_mode(text) or text in _WRITING_FLAGS for text in near)


def _is_writing_mode(text: str) -> bool:
    return 0 < len(text) <= 4 and set(text) <= set("rwxab+t") and bool(set(text) & set("wax+"))


def _attaches(code: types.CodeType) -> bool:
    """Tells if a database in memory is left for a file."""
    texts = [constant.upper() for constant in code.co_consts if isinstance(constant, str)]
    return any("ATTACH" in text or "VACUUM INTO" in text for text in texts)


def _chains(function: types.FunctionType, steps: Sequence[dis.Instruction]) -> Iterator[tuple[int, str]]:
    """(place behind it, dotted name) of each name that is loaded."""
    imported: dict[str, str] = {}
    name = package = new = ""
    for place, step in enumerate(steps):
        argument = step.argval if isinstance(step.argval, str) else ""
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name += f".{argument}"
            continue
        if name:
            yield place, name
        name = ""
        if step.opname == "IMPORT_NAME":
            package, new = argument, argument.partition(".")[0]
        elif step.opname == "IMPORT_FROM":
            new = f"{package.removesuffix('.' + argument)}.{argument}"
        elif step.opname.startswith("STORE_") and new:
            imported[argument], new = new, ""
        elif step.opname.startswith("LOAD_FAST"):
            name = imported.get(argument, "")  # any other local variable has no name that is known
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            name = imported.get(argument) or _own_name(function, argument, builtin=step.opname != "LOAD_DEREF")
    if name:
        yield len(steps), name


def _own_name(function: types.FunctionType, name: str, *, builtin: bool) -> str:
    """The dotted name: of a module under any alias, a function, or an object's class."""
    enclosing = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    try:
        value = enclosing[name].cell_contents if name in enclosing else function.__globals__[name]
    except (KeyError, ValueError):  # a builtin, a variable of the function around, a cell not filled yet
        return name if builtin else ""
    if isinstance(value, types.ModuleType):
        return value.__name__
    owner = value if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) else type(value)
    if owner.__module__ in (None, "builtins"):
        return name
    return f"{owner.__module__}.{owner.__name__}"
