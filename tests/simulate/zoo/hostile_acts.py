"""The acts themselves, and how to see afterwards that one has happened."""

import asyncio
import http.client
import multiprocessing.util
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from typing import Any

from zoo.base import World

ACTS: dict[str, Callable[[World], Any]] = {}
WITNESSES: dict[str, Callable[[World], bool]] = {}


def seen_by(witness: Callable[[World], bool]) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
    """Put the decorated act into ACTS under its name, and its witness into WITNESSES."""

    def keep(act: Callable[[World], Any]) -> Callable[[World], Any]:
        ACTS[act.__name__], WITNESSES[act.__name__] = act, witness
        return act

    return keep


def visited(world: World) -> bool:
    return bool(world.hits)


def there(name: str) -> Callable[[World], bool]:
    return lambda world: os.path.lexists(world.folder / name)


def gone(name: str) -> Callable[[World], bool]:
    return lambda world: not os.path.lexists(world.folder / name)


def changed(name: str) -> Callable[[World], bool]:
    return lambda world: (world.folder / name).read_text() != "precious"


def url(world: World) -> str:
    return f"http://127.0.0.1:{world.port}/harm"


# The network


@seen_by(visited)
def raw_socket(world: World) -> bytes:
    with socket.socket() as client:
        client.connect(("127.0.0.1", world.port))
        client.sendall(b"harm\n")
        return client.recv(100)


@seen_by(visited)
def socket_connect_ex(world: World) -> bytes:
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", world.port)) == 0
        client.sendall(b"harm\n")
        return client.recv(100)


@seen_by(visited)
def http_client(world: World) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", world.port)) as connection:
        connection.request("POST", "/harm")
        return connection.getresponse().read()


@seen_by(visited)
def urllib_request(world: World) -> bytes:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url(world), b"harm") as response:
        return response.read()


@seen_by(visited)
async def asyncio_stream(world: World) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(b"harm\n")
    answer = await reader.read()
    writer.close()
    return answer


if find_spec("httpx"):
    import httpx

    @seen_by(visited)
    def httpx_sync(world: World) -> str:
        with httpx.Client(trust_env=False) as client:
            return client.post(url(world)).text

    @seen_by(visited)
    async def httpx_async(world: World) -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.post(url(world))).text


if find_spec("requests"):
    import requests

    @seen_by(visited)
    def requests_post(world: World) -> str:
        with requests.Session() as session:
            session.trust_env = False
            return session.post(url(world)).text


if find_spec("aiohttp"):
    import aiohttp

    @seen_by(visited)
    async def aiohttp_post(world: World) -> str:
        async with aiohttp.ClientSession() as session, session.post(url(world)) as response:
            return await response.text()


# Other processes


def script(world: World) -> list[str]:
    return [sys.executable, "-S", "-c", f"open({str(world.folder / 'child.txt')!r}, 'w').write('harm')"]


@seen_by(there("child.txt"))
def subprocess_run(world: World) -> None:
    subprocess.run(["touch", world.folder / "child.txt"], check=True)


@seen_by(there("child.txt"))
def os_system(world: World) -> None:
    os.system(f"touch '{world.folder}/child.txt'")


@seen_by(there("child.txt"))
def os_popen(world: World) -> None:
    os.popen(f"touch '{world.folder}/child.txt'").close()


@seen_by(there("child.txt"))
def posix_spawn(world: World) -> None:
    os.waitpid(os.posix_spawnp("touch", ["touch", str(world.folder / "child.txt")], os.environ), 0)


@seen_by(there("child.txt"))
async def asyncio_subprocess(world: World) -> None:
    await (await asyncio.create_subprocess_exec(*script(world))).wait()


@seen_by(there("child.txt"))
def spawnv_passfds(world: World) -> None:
    command = [b"touch", os.fsencode(world.folder / "child.txt")]
    os.waitpid(multiprocessing.util.spawnv_passfds(b"/usr/bin/touch", command, ()), 0)


# Files


@seen_by(gone("victim.txt"))
def os_remove(world: World) -> None:
    os.remove(world.folder / "victim.txt")


@seen_by(gone("victim.txt"))
def path_unlink(world: World) -> None:
    (world.folder / "victim.txt").unlink()


@seen_by(gone("house"))
def rmtree(world: World) -> None:
    shutil.rmtree(world.folder / "house")


@seen_by(gone("empty"))
def os_rmdir(world: World) -> None:
    os.rmdir(world.folder / "empty")


@seen_by(changed("victim.txt"))
def open_write(world: World) -> None:
    with open(world.folder / "victim.txt", "w") as file:
        file.write("harm")


@seen_by(changed("victim.txt"))
def open_append(world: World) -> None:
    with open(world.folder / "victim.txt", "ab") as file:
        file.write(b"harm")


@seen_by(changed("victim.txt"))
def open_update(world: World) -> None:
    with open(world.folder / "victim.txt", "r+") as file:
        file.write("harm")


@seen_by(there("new.txt"))
def open_exclusive(world: World) -> None:
    open(world.folder / "new.txt", "x").close()


@seen_by(changed("victim.txt"))
def path_write_text(world: World) -> None:
    (world.folder / "victim.txt").write_text("harm")


@seen_by(there("new.txt"))
def path_touch(world: World) -> None:
    (world.folder / "new.txt").touch()


@seen_by(changed("victim.txt"))
def os_open(world: World) -> None:
    file = os.open(world.folder / "victim.txt", os.O_WRONLY)
    os.write(file, b"harm")
    os.close(file)


@seen_by(changed("victim.txt"))
def os_truncate(world: World) -> None:
    os.truncate(world.folder / "victim.txt", 0)


@seen_by(there("taken.txt"))
def os_rename(world: World) -> None:
    os.rename(world.folder / "moved.txt", world.folder / "taken.txt")


@seen_by(gone("moved.txt"))
def os_replace(world: World) -> None:
    os.replace(world.folder / "moved.txt", world.folder / "victim.txt")


@seen_by(there("taken.txt"))
def shutil_move(world: World) -> None:
    shutil.move(world.folder / "moved.txt", world.folder / "taken.txt")


@seen_by(there("copy.txt"))
def shutil_copy(world: World) -> None:
    shutil.copy(world.folder / "victim.txt", world.folder / "copy.txt")


@seen_by(there("made"))
def os_mkdir(world: World) -> None:
    os.mkdir(world.folder / "made")


@seen_by(there("made"))
def os_makedirs(world: World) -> None:
    os.makedirs(world.folder / "made/deep", exist_ok=True)


@seen_by(there("link"))
def os_symlink(world: World) -> None:
    os.symlink(world.folder / "victim.txt", world.folder / "link")


@seen_by(there("link"))
def os_link(world: World) -> None:
    os.link(world.folder / "victim.txt", world.folder / "link")


@seen_by(lambda world: not (world.folder / "victim.txt").stat().st_mode & 0o400)
def os_chmod(world: World) -> None:
    os.chmod(world.folder / "victim.txt", 0)


@seen_by(lambda world: not (world.folder / "victim.txt").stat().st_mode & 0o400)
def os_fchmod(world: World) -> None:
    file = os.open(world.folder / "victim.txt", os.O_RDONLY)
    os.fchmod(file, 0)
    os.close(file)


@seen_by(there("__pycache__"))
def open_in_a_bytecode_folder(world: World) -> None:
    os.makedirs(world.folder / "__pycache__", exist_ok=True)
    (world.folder / "__pycache__/new.txt").write_text("harm")


@seen_by(lambda world: any(world.folder.glob("harm*")))
def temporary_file(world: World) -> None:
    os.close(tempfile.mkstemp(prefix="harm", dir=world.folder)[0])


@seen_by(there("rows.db"))
def sqlite_write(world: World) -> None:
    with closing(sqlite3.connect(world.folder / "rows.db")) as database, database:
        database.execute("CREATE TABLE harm (done INTEGER)")


# Code that others call


@seen_by(there("made"))
def executor_initializer(world: World) -> None:
    with ThreadPoolExecutor(1, initializer=os.mkdir, initargs=(world.folder / "made",)) as pool:
        pool.submit(int).result()


@seen_by(there("made"))
def done_callback(world: World) -> None:
    begin = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(begin.wait).add_done_callback(lambda _: os.mkdir(world.folder / "made"))
        begin.set()
