"""The oldest and the newest supported LangGraph and LangChain, installed for this: an agent streams and dreams with both."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["openai"]]
BOUNDS = {
    name: bounds
    for name, bounds in (re.fullmatch(r"([\w-]+)(.*)", each).groups() for each in OURS)  # type: ignore[union-attr]
    if name in ("langchain", "langchain-core", "langgraph", "langgraph-checkpoint-sqlite", "langsmith")
}
SIBLINGS = {"langgraph-checkpoint": ">=4.1,<5", "langgraph-prebuilt": ">=1.1,<1.2", "langgraph-sdk": ">=0.3,<1"}
"""What langgraph's own metadata allow, of the parts that it is made of."""
PLAYED = [f"tests/{name}.py" for name in ("simulate/test_streams", "simulate/test_tracing", "graphs/test_episode")]


def oldest() -> Iterator[str]:
    for name, bounds in {**BOUNDS, **SIBLINGS}.items():
        yield f"{name}=={re.findall(r'>=([0-9.]+)', bounds)[0]}"


def newest() -> Iterator[str]:
    yield from (f"{name}{bounds}" for name, bounds in {**BOUNDS, **SIBLINGS, "langchain-protocol": ""}.items())


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [oldest, newest])
def test_it_works_with_these_versions(wanted: object, tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"  # by that name the code there is known to be a library's
    requirements = list(wanted())  # type: ignore[operator]
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--target", str(folder), *requirements]
    installed = subprocess.run(uv, capture_output=True, text=True)
    if installed.returncode and "Failed to fetch" in installed.stderr:
        pytest.skip(f"the registry cannot be reached: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    played = subprocess.run(
        [sys.executable, "-m", "pytest", *PLAYED, "-m", "not slow", "-k", "not opentelemetry", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert played.returncode == 0, played.stdout[-3000:]
