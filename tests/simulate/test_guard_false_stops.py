"""What Python and its packages do once per process, and finalisers of production's objects: no doing of the episode's."""

import ctypes.util
import email.utils
import gc
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import dreamed

FIRST_TIME = """
import http.server, sys, threading
sys.path.insert(0, sys.argv[1])
from worlds import dreamed
from dreamgym_lg.simulate import Allow


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"data": [], "object": "list"}')

    def log_message(self, *_):
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
port = server.server_address[1]


def temporary():
    import tempfile

    return tempfile.gettempdir()


def openai():
    from openai import OpenAI

    return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0).models.list().data


def matplotlib():
    import matplotlib.font_manager

    return len(matplotlib.font_manager.fontManager.ttflist) > 0


for act in (temporary, openai, matplotlib):
    episode = dreamed(act, allow=Allow(hosts=[f"127.0.0.1:{port}"]))
    print(act.__name__, [str(each) for each in episode.blocked], episode.state["result"])
"""


@pytest.mark.slow
def test_the_first_use_of_common_packages_in_a_process(tmp_path: Path) -> None:
    for package in ("openai", "matplotlib"):
        pytest.importorskip(package)
    environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "mpl"), "TMPDIR": str(tmp_path), "NO_PROXY": "*"}
    command = [sys.executable, "-c", FIRST_TIME, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"temporary [] {tmp_path}", "openai [] []", "matplotlib [] True"], done.stderr


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just started."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(platform, "_uname_cache", None)
    monkeypatch.setattr(platform, "_platform_cache", {})


@pytest.mark.parametrize(
    "ask",
    [
        tempfile.gettempdir,
        platform.platform,
        lambda: platform.uname().processor,
        platform.architecture,
        lambda: ctypes.util.find_library("c"),
        email.utils.make_msgid,
        lambda: os.kill(os.getpid(), 0),
    ],
)
@pytest.mark.usefixtures("nothing_known")
def test_asking_about_this_machine(ask: Callable[[], Any]) -> None:
    assert dreamed(ask).blocked == []


def test_asking_does_not_excuse_what_is_done_with_the_answer(tmp_path: Path) -> None:
    class Harmful:
        def __fspath__(self) -> str:
            (tmp_path / "harm").write_text("x")
            return sys.executable

    assert dreamed(lambda: platform.libc_ver(Harmful())).blocked  # type: ignore[arg-type]
    assert dreamed(tempfile.mkdtemp).blocked
    assert not (tmp_path / "harm").exists()


class Files:
    """A user's object that puts a file away when it dies."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        self.path.unlink()


def cyclic_folder(parent: Path) -> Any:
    made: Any = tempfile.TemporaryDirectory(dir=parent)
    made.itself = made
    return made


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up")
def test_finalisers_of_productions_objects(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    held = [Files(tmp_path / "file"), cyclic_folder(tmp_path), tempfile.TemporaryDirectory(dir=tmp_path)]

    def collect() -> None:
        held.clear()
        gc.collect()

    assert dreamed(collect).blocked == []
    assert list(tmp_path.iterdir()) == []
