"""The wall: every act of `wall_acts` has its effect without it, and none behind it; and programs run behind it as before."""

import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from wall_acts import ACTS, libc, sys_call

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.simulate import Allow
from dreamgym_lg.simulate.wall import kernel
from dreamgym_lg.simulate.wall.wall import _ports, check_wall, limits_of_wall, missing_for_wall, start_walled

SCRIPT = Path(__file__).with_name("wall_acts.py")
IPC = "/proc/sysvipc"

pytestmark = pytest.mark.skipif(bool(missing_for_wall()), reason=f"no wall here: {missing_for_wall()}")


class Scene:
    """A piece of the real world, and what can be seen of it from outside."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.scratch, self.outside = folder / "scratch", folder / "outside"
        for each in (self.scratch, self.outside / "folder", self.outside / "empty"):
            each.mkdir(parents=True)
        self.file = self.outside / "kept.txt"
        self.file.write_text("kept")
        os.setxattr(self.file, "user.kept", b"kept")
        (self.outside / "folder" / "inner.txt").write_text("inner")
        (self.outside / "link").symlink_to(self.file)
        database = self.outside / "base.db"
        with closing(sqlite3.connect(database)) as base:
            base.execute("CREATE TABLE t (a)")
        self.name = f"/dreamgym_{os.getpid()}_{folder.name}"[:60]
        self.key = 0x5EED0000 + os.getpid() % 0xFFFF
        self.received: list[bytes] = []
        self.memory = ctypes.create_string_buffer(b"untouched!!", 11)
        self.victim = stack.enter_context(_victim())
        self.pipe, self._pipe_in = os.pipe()
        os.set_blocking(self.pipe, False)
        stack.callback(os.close, self.pipe)
        stack.callback(os.close, self._pipe_in)
        self.server = stack.enter_context(_server(self.received))
        self.sockets = [_bound(stack, socket.AF_INET, ("127.0.0.1", 0))]
        self.sockets += [_bound(stack, socket.AF_UNIX, str(folder / "d")), _bound(stack, socket.AF_UNIX, "\0" + self.name)]
        self.stream = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.stream.bind(str(folder / "s"))
        self.stream.listen()
        ours, self.theirs = socket.socketpair()
        self.sockets.append(stack.enter_context(ours))
        stack.enter_context(self.theirs)
        for each in (*self.sockets, self.stream):
            each.setblocking(False)
        self.inherited = os.open(self.file, os.O_WRONLY | os.O_APPEND)
        self.folder_fd = os.open(self.outside, os.O_RDONLY)
        stack.callback(os.close, self.inherited)
        stack.callback(os.close, self.folder_fd)
        self.signals: list[int] = []
        before = signal.signal(signal.SIGUSR1, lambda number, _: self.signals.append(number))
        stack.callback(signal.signal, signal.SIGUSR1, before)
        stack.callback(self.clean)
        self.description = folder / "scene.json"
        self.description.write_text(json.dumps(self._described(folder, database)))

    def _described(self, folder: Path, database: Path) -> dict[str, Any]:
        port = self.server.server_address[1]
        return {
            **{"scratch": str(self.scratch), "outside": str(self.outside), "file": str(self.file), "database": str(database)},
            **{"folder": str(self.outside / "folder"), "empty": str(self.outside / "empty"), "new": str(self.outside / "new")},
            **{"symlink": str(self.outside / "link"), "shm": self.name, "abstract": self.name, "key": self.key},
            **{"port": port, "url": f"http://127.0.0.1:{port}/", "udp": self.sockets[0].getsockname()[1]},
            **{"stream": str(folder / "s"), "datagram": str(folder / "d"), "connected": self.theirs.fileno()},
            **{"victim": self.victim.pid, "parent": os.getpid(), "address": ctypes.addressof(self.memory)},
            **{"pipe": self._pipe_in, "inherited": self.inherited, "folder_fd": self.folder_fd},
        }

    def play(self, name: str, acts: socket.socket, *, walled: bool) -> str:
        """One act in a process of its own; returns what it said. All that holds its output has ended by then."""
        reads, writes = os.pipe()
        order = json.dumps({"name": name, "walled": walled, "scene": json.loads(self.description.read_text())})
        socket.send_fds(acts, [order.encode()], [writes, self.inherited, self.folder_fd, self.theirs.fileno()])
        os.close(writes)
        with open(reads) as output:
            return output.read()

    def changed(self, before: dict[str, Any], *, expected: bool) -> bool:
        """Whether an act had an effect. One that is expected may take a moment: a process that is signalled has to die."""
        deadline = time.monotonic() + expected
        while not (found := self.seen() != before) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def seen(self) -> dict[str, Any]:
        """Everything about the outside that an act can change."""
        found: dict[str, Any] = {str(path): _seen(path) for path in [self.outside, *sorted(self.outside.rglob("*"))]}
        with suppress(BlockingIOError):
            found["pipe"] = os.read(self.pipe, 100)
        for number, each in enumerate((*self.sockets, self.stream)):
            with suppress(BlockingIOError):
                found[f"socket {number}"] = repr(each.accept()[1] if each is self.stream else each.recv(100))
        found["received"], found["signals"], found["memory"] = list(self.received), list(self.signals), self.memory.raw
        found["shm"] = os.path.exists(f"/dev/shm{self.name}") or self._queue_exists()
        found["ipc"] = [str(self.key) in Path(IPC, kind).read_text() for kind in ("shm", "sem", "msg")]
        found["key"] = self.name in Path("/proc/keys").read_text() if os.path.exists("/proc/keys") else False
        found["victim"] = self.victim.poll()
        if found["victim"] is None:
            pid = self.victim.pid
            found["victim is"] = os.sched_getaffinity(pid), os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
            found["limits"] = Path(f"/proc/{pid}/limits").read_text()
            found["io"] = libc.syscall(252 if os.uname().machine == "x86_64" else 31, 1, pid)
        return found

    def _queue_exists(self) -> bool:
        with suppress(OSError):
            os.close(sys_call(240 if os.uname().machine == "x86_64" else 180, self.name[1:].encode(), os.O_RDONLY, 0, None))
            return True
        return False

    def clean(self) -> None:
        """What an act without a wall left on this machine."""
        libc.umount2(str(self.outside).encode(), 2)
        with suppress(OSError):
            os.unlink(f"/dev/shm{self.name}")
        with suppress(OSError):
            sys_call(241 if os.uname().machine == "x86_64" else 181, self.name[1:].encode())
        for flag in ("-M", "-S", "-Q"):
            subprocess.run(["ipcrm", flag, hex(self.key)], stderr=subprocess.DEVNULL, check=False)


@contextmanager
def _victim() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


@contextmanager
def _server(received: list[bytes]) -> Iterator[ThreadingHTTPServer]:
    """Takes whatever comes, HTTP or not, and notes that it came."""

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            received.append(b"connected")
            with suppress(OSError):
                super().handle()

        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _bound(stack: ExitStack, family: int, address: Any) -> socket.socket:
    made = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
    made.bind(address)
    return made


def _seen(path: Path) -> Any:
    stat = path.lstat()
    facts: list[Any] = [stat.st_mode, stat.st_uid, stat.st_nlink, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    if path.is_file() and not path.is_symlink():
        facts += [path.read_bytes(), {name: os.getxattr(path, name) for name in os.listxattr(path)}]
    return facts


@contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    folder.mkdir()
    with ExitStack() as stack:
        yield Scene(folder, stack)


def _can(needs: str) -> bool:
    if needs == "root":
        return os.geteuid() == 0
    return not needs or bool(importlib.util.find_spec(needs) or shutil.which(needs))


@pytest.fixture(scope="module")
def acts() -> Iterator[socket.socket]:
    """What forks a process for each act."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    command = [sys.executable, str(SCRIPT), "serve", str(theirs.fileno()), kernel.__file__]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]):
        theirs.close()
        yield ours
        ours.close()


QUICK = ("open_w", "unlink", "rename", "chmod", "libc_open", "sqlite_file", "sh_redirect", "process_forked", "tcp", "udp")
QUICK += ("unix_stream", "kill", "ptrace", "mount", "memory_written", "shared_memory")
"""One of each kind; each starts processes."""
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ACTS]


@pytest.mark.parametrize("name", CASES)
def test_it_happens_without_the_wall_and_not_behind_it(name: str, acts: socket.socket, tmp_path: Path) -> None:
    if not _can(ACTS[name].needs) and ACTS[name].needs != "root":
        pytest.skip(f"{ACTS[name].needs} is not installed")
    with scene(tmp_path / "walled") as world:
        before = world.seen()
        said = world.play(name, acts, walled=True)
        assert said.startswith("began"), said
        assert world.seen() == before, said
    with scene(tmp_path / "real") as world:
        before = world.seen()
        said = world.play(name, acts, walled=False)
        able = _can(ACTS[name].needs)
        assert world.changed(before, expected=able) or not able, f"this act has no effect at all: {said}"


def walled(command: list[str | Path], scratch: Path, allow: Allow | None = None, **options: Any) -> tuple[int, str]:
    """The status of a walled program, and what it said."""
    scratch.mkdir(exist_ok=True)
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | options
    with start_walled(command, scratch=scratch, allow=allow, **options) as process:
        said = process.communicate(timeout=60)[0].decode()
    return process.returncode, said


@pytest.mark.parametrize(
    "name", ["open_w", "sh_redirect", "chmod", "mount", "kill", "kill_parent", "http_client", "process_pool"]
)
def test_it_does_not_happen_in_a_walled_program(name: str, tmp_path: Path) -> None:
    with scene(tmp_path / "world") as world:
        before = world.seen()
        _, said = walled([sys.executable, SCRIPT, name, world.description], world.scratch)
        assert said.startswith("began") and world.seen() == before, said


WORKS = {
    "scratch": "open(f'{scratch}/a', 'w').write('x'); os.rename(f'{scratch}/a', f'{scratch}/b'); os.mkdir(f'{scratch}/f');"
    "os.rename(f'{scratch}/b', f'{scratch}/f/b'); os.truncate(f'{scratch}/f/b', 0); os.symlink('b', f'{scratch}/f/s');"
    "os.link(f'{scratch}/f/b', f'{scratch}/c'); os.mkfifo(f'{scratch}/fifo'); os.unlink(f'{scratch}/c')",
    "temporary": "import tempfile; tempfile.TemporaryDirectory().cleanup(); tempfile.TemporaryFile().write(b'x');"
    "assert tempfile.gettempdir() == scratch",
    "sqlite": "import sqlite3; sqlite3.connect(f'{scratch}/d').execute('CREATE TABLE t (a)')",
    "reading": "open(__import__('json').__file__).read(); os.listdir('/'); open('/proc/self/status').read()",
    "nothing": "open('/dev/null', 'w').write('x'); print('x', file=open(os.devnull, 'w'))",
    "programs": "import subprocess; assert subprocess.run(['sh', '-c', 'echo hi; echo x > $TMPDIR/y'], text=True,"
    "capture_output=True, check=True).stdout == 'hi\\n'",
    "children": "p = os.fork(); p or (__import__('time').sleep(60)); os.kill(p, 9); assert os.waitpid(p, 0)[1] == 9",
    "threads": "from multiprocessing.pool import ThreadPool; from concurrent.futures import ThreadPoolExecutor;"
    "assert list(ThreadPoolExecutor(2).map(abs, [-1])) == [1]; t = __import__('threading').Thread(target=print);"
    "t.start(); t.join()",
    "event_loop": "import asyncio; asyncio.run(asyncio.sleep(0)); asyncio.run(asyncio.to_thread(print))",
    "pipes": "import multiprocessing as m; a, b = m.Pipe(); b.send(1); assert a.recv() == 1; __import__('socket').socketpair()",
    "terminal": "assert not sys.stdout.isatty(); import getpass; print(__import__('platform').uname())",
    "own_limits": "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 64)); os.nice(1); os.sched_setaffinity(0,"
    "os.sched_getaffinity(0)); import faulthandler; faulthandler.enable()",
    "no_core_dump": "import resource as r; assert r.getrlimit(r.RLIMIT_CORE) == (1, 1)",
    "limited_memory": "pages = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')\ntry:\n    bytearray(pages * 2 // 3)\n"
    "except MemoryError:\n    pass\nelse:\n    raise SystemExit('more than half')",
    "limited_files": "disk = os.statvfs(scratch)\ntry:\n"
    "    open(f'{scratch}/large', 'w').truncate(disk.f_frsize * disk.f_bavail)\n"
    "except OSError as error:\n    assert error.errno == 27\nelse:\n    raise SystemExit('larger')",
    "memory": "import mmap; mmap.mmap(-1, 4096)[:1] = b'x'; os.write(os.memfd_create('m'), b'x')",
    "numpy": "import numpy; numpy.save(f'{scratch}/n', numpy.ones((300, 300)) @ numpy.ones((300, 300)))",
    "process": "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start(); p.join();"
    "assert p.exitcode == 0",
}
"""What agents do without touching anything: it goes on behind the wall."""


@pytest.mark.parametrize("name", WORKS)
def test_what_touches_nothing_works_behind_the_wall(name: str, tmp_path: Path) -> None:
    code = f"import os, sys\nscratch = {str(tmp_path / 'scratch')!r}\n{WORKS[name]}\nprint('done')"
    status, said = walled([sys.executable, "-c", code], tmp_path / "scratch")
    assert status == 0 and said.endswith("done\n"), said


REFUSED = {
    "mount": ("libc.mount(b'none', b'/mnt', b'tmpfs', 0, None)", "EPERM"),
    "user namespace": ("libc.unshare(0x10000000)", "EPERM"),
    "cloned namespace": ("sys_call(56 if X86 else 220, 0x10000000 | 17, None, None, None, None)", "EPERM"),
    "clone3": ("sys_call(435, None, 0)", "ENOSYS"),
    "io_uring": ("sys_call(425, 1, ctypes.create_string_buffer(120))", "ENOSYS"),
    "later calls": ("sys_call(470)", "ENOSYS"),
    "bpf": ("sys_call(321 if X86 else 280, 0, None, 0)", "EPERM"),
    "root folder": ("libc.chroot(b'/')", "EPERM"),
    "host name": ("libc.sethostname(b'x', ctypes.c_long(1))", "EPERM"),
    "user": ("libc.setuid(12345)", "EPERM"),
    "terminal": ("libc.ioctl(0, 0x5412, b'x')", "EPERM"),
    "all of a user's priorities": ("libc.setpriority(2, 0, 0)", "EPERM"),
    "inotify": ("libc.inotify_init1(0)", "EMFILE"),
    "fanotify": ("sys_call(300 if X86 else 262, 0x200, 0)", "EMFILE"),
    "asynchronous files": ("sys_call(206 if X86 else 0, 1, ctypes.create_string_buffer(8))", "EAGAIN"),
    "hint for a file": ("libc.fcntl(libc.open(b'/etc/passwd', 0), 1036, ctypes.create_string_buffer(8))", "EPERM"),
    "lease": ("libc.fcntl(libc.open(b'/etc/passwd', 0), 1024, 0)", "EPERM"),
    "netlink": ("libc.socket(16, 3, 0)", "EACCES"),
    "vsock": ("libc.socket(40, 1, 0)", "EACCES"),
    "datagrams in a pair": ("libc.socketpair(1, 2, 0, ctypes.create_string_buffer(8))", "EACCES"),
}


def test_what_could_undo_the_wall_is_refused(tmp_path: Path) -> None:
    lines = [f"say({call!r}, {call})" for call, _ in REFUSED.values()]
    code = f"""
import ctypes, errno, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
from wall_acts import X86, libc
def sys_call(*args): return libc.syscall(*(ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args))
def say(name, result): print(errno.errorcode[ctypes.get_errno()] if result < 0 else "none")
"""
    status, said = walled([sys.executable, "-c", code + "\n".join(lines)], tmp_path / "scratch")
    assert said.split() == [error for _, error in REFUSED.values()] and status == 0


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="32-bit calls are of x86-64 alone")
def test_calls_of_another_machine_are_refused(tmp_path: Path) -> None:
    """`int 0x80` names the calls of a 32-bit program: its 20 is getpid, and 39 mkdir."""
    code = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20; int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""
    assert walled([sys.executable, "-c", code], tmp_path / "scratch") == (0, "-38\n")


def test_no_descriptor_stays_open_but_the_standard_three(tmp_path: Path) -> None:
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        command: list[str | Path] = ["/bin/sh", "-c", "cd /proc/self/fd; echo *"]
        _, listing = walled(command, tmp_path / "scratch", close_fds=False)
        numbers = set(map(int, listing.split()))
        assert {0, 1, 2} <= numbers and file.fileno() not in numbers and len(numbers) <= 4  # the listing's own


def test_allowed_paths_can_be_written(tmp_path: Path) -> None:
    folder, file, other = tmp_path / "folder", tmp_path / "file", tmp_path / "other"
    folder.mkdir()
    file.write_text("")
    other.write_text("")
    script = f"echo 1 > {folder}/new; echo 2 > {file}; echo 3 > {other}; rm {file}; mv $TMPDIR {folder}/moved; ls {folder}"
    _, said = walled(["/bin/sh", "-c", script], tmp_path / "scratch", Allow(paths=[folder, file]))
    assert (folder / "new").read_text() == "1\n" and file.read_text() == "2\n" and other.read_text() == "", said


def test_a_path_that_does_not_exist_cannot_be_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="missing' does not exist.*allow its folder"):
        start_walled(["/bin/true"], scratch=tmp_path, allow=Allow(paths=[tmp_path / "missing"]))


@pytest.mark.parametrize("given", ["localhost:http", "localhost:0", "localhost:65536", "[::1]:http"])
def test_a_port_has_to_be_one(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no port"):
        start_walled(["/bin/true"], scratch=tmp_path, allow=Allow(hosts=[given]))


def test_an_address_with_colons_is_allowed_at_its_port_alone(tmp_path: Path) -> None:
    allow = Allow(hosts=["[::1]:8080", "10.0.0.1:90"])
    assert _ports(allow) == [90, 8080] and _ports(Allow(hosts=["::1"])) is None
    assert allow.host("::1", 8080) and not allow.host("::1", 8081) and not allow.host("10.0.0.1", 8080)


def test_allowed_hosts_can_be_reached_at_their_port_alone(tmp_path: Path) -> None:
    first, second = list[bytes](), list[bytes]()
    with _server(first) as allowed, _server(second) as other, socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        ports = allowed.server_address[1], other.server_address[1], udp.getsockname()[1]
        code = f"""
import socket, urllib.request
def attempt(function):
    try:
        function()
        print("yes")
    except OSError as error:
        print(type(error).__name__)
port, other, udp = {ports}
attempt(lambda: urllib.request.urlopen(f"http://127.0.0.1:{{port}}/", b"x").read())
attempt(lambda: socket.create_connection(("127.0.0.1", other)))
attempt(lambda: socket.socket().sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", other)))
attempt(lambda: socket.socket().sendmsg([b"x"], [], socket.MSG_FASTOPEN, ("127.0.0.1", other)))
attempt(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", udp)))
attempt(lambda: socket.socket(proto=262).connect(("127.0.0.1", other)))
attempt(lambda: socket.socket(socket.AF_UNIX))
attempt(lambda: socket.socket().bind(("127.0.0.1", 0)))
attempt(lambda: socket.socket().listen())
"""
        allow = Allow(hosts=[f"127.0.0.1:{ports[0]}"])
        _, said = walled([sys.executable, "-c", code], tmp_path / "scratch", allow)
        assert said.split() == ["yes", *["PermissionError"] * 8] and first == [b"connected"] and second == []
        with pytest.raises(BlockingIOError):
            udp.recv(1)
        _, said = walled([sys.executable, "-c", code], tmp_path / "any", Allow(hosts=["127.0.0.1"]))
        assert said.split() == ["yes", "yes", *["PermissionError"] * 7], "a host without a port opens every port"


def test_the_wall_is_built_before_there_are_threads() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(OSError, match=r"the process has \d+ threads.*build it earlier"):
            kernel.build_wall(writable=[])
    finally:
        stop.set()
        thread.join()


def test_a_program_that_may_start_no_process_has_threads_all_the_same(tmp_path: Path) -> None:
    """Root has no limit of processes: only the call itself can be refused."""
    code = (
        "import os, subprocess, threading; t = threading.Thread(target=print); t.start(); t.join()\n"
        "for start in (os.fork, lambda: subprocess.run(['true']), lambda: os.posix_spawn('/bin/true', ['t'], {})):\n"
        "    try: start()\n"
        "    except OSError as error: print(type(error).__name__)"
    )
    status, said = walled([sys.executable, "-c", code], tmp_path / "scratch", children=False)
    assert (status, said.split()) == (0, ["BlockingIOError"] * 3), said


def test_a_machine_without_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not missing_for_wall() and limits_of_wall() == []
    check_wall()
    monkeypatch.setattr(kernel, "landlock_abi", lambda: 0)
    monkeypatch.setattr(kernel, "has_seccomp", lambda: False)
    with pytest.raises(ConfigurationError, match=r"Landlock, of Linux 5.13.*seccomp.*isolation='guard' by name"):
        start_walled(["/bin/true"], scratch=tmp_path)


OF_OLD_KERNELS = (
    "open_w",
    "sh_redirect",
    "truncate",
    "open_truncates",
    "kill",
    "kill_parent",
    "sigqueue",
    "http_client",
    "chmod",
)


@pytest.mark.parametrize("abi", [1, 2, 3, 4, 5])
def test_an_older_kernel_stops_it_too(abi: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall as a kernel with that version of Landlock builds it: what it lacks a filter of system calls does."""
    monkeypatch.setattr(kernel, "landlock_abi", lambda: abi)
    with scene(tmp_path / "world") as world:
        before = world.seen()
        _, said = walled([sys.executable, str(SCRIPT), ",".join(OF_OLD_KERNELS), str(world.description)], world.scratch)
        assert said.count("began") == len(OF_OLD_KERNELS) and world.seen() == before, said


def test_what_an_older_kernel_cannot_promise_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel, "landlock_abi", lambda: 1)
    assert [text.split(",")[0] for text in limits_of_wall()] == [f"before Linux {each}" for each in ("6.7", "6.12", "5.19")]
    _, said = walled([sys.executable, "-c", WORKS["temporary"].replace("scratch", repr(str(tmp_path / "s")))], tmp_path / "s")
    assert said == ""


@pytest.mark.slow
def test_a_part_that_the_kernel_refuses_starts_nothing(tmp_path: Path) -> None:
    """Here by the wall itself: Landlock takes 16 layers."""
    command: list[str | Path] = ["/bin/sh", "-c", "echo started"]
    for _ in range(16):
        options = json.dumps({"writable": [str(tmp_path)]})
        command = [sys.executable, "-I", "-S", kernel.__file__, options, *command]
    status, said = walled(command, tmp_path / "scratch")
    assert status == 1 and "Landlock" in said and "started" not in said


@pytest.mark.parametrize(
    ("column", "header"), [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")]
)
def test_the_numbers_are_the_kernels(column: int, header: str) -> None:
    if not os.path.exists(header):
        pytest.skip(f"{header} is not installed")
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)\b", Path(header).read_text())}
    ours = {name: numbers[column] for name, numbers in kernel.NUMBERS.items()}
    assert {name: number for name, number in ours.items() if name in known and number != known[name]} == {}
    assert {name for rule in kernel.RULES for name in rule.calls.split()} <= ours.keys()
    later = {"fchmodat2", "setxattrat", "removexattrat", "file_setattr"}  # than the headers of a distribution
    later |= {"fcntl", "truncate"} if column else set()  # which the header writes as __NR3264_fcntl
    assert {name for name, number in ours.items() if number is not None} - known.keys() <= later
