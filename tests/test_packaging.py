"""What a user installs: the wheel, built through the sdist, in an environment that never saw this repository."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {"dreamgym_lg": "dreamgym_lg", "graphs": "dreamgym_lg/graphs", "integrations": "dreamgym_lg/integrations"}
HEAVY = {"accelerate", "datasets", "matplotlib", "pandas", "peft", "torch", "transformers", "trl"}
CORE_IMPORTS = "import dreamgym_lg, dreamgym_lg.cli.app, dreamgym_lg.graphs.episode, dreamgym_lg.graphs.training"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """The command's standard output; a failure raises with both outputs in the message."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from it, of a copy: setuptools writes build/ and egg-info/ beside
    the source, and a stale build/ would put deleted modules in the wheel."""
    source = tmp_path_factory.mktemp("source")
    for name in ["pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, source)
    for name in [*SHIPPED, "cookbook", "tests"]:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, source, cwd=source)
    return built


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds the wheel and sees this environment's packages, dreamgym-lg's own excepted:
    Python does not follow the .pth file of an editable install in a folder that a .pth file itself names."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", home / "bin/python", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    paths = [path for path in sys.path if Path(path).name == "site-packages"]
    site = next(home.glob("lib/python*/site-packages"))
    (site / "outer.pth").write_text("\n".join(paths))
    return home


def test_the_wheel_holds_the_three_folders_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert names == set(shipped())


def test_the_wheel_carries_the_licence_and_declares_every_extra(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        metadata = archive.read("dreamgym_lg-0.1.0.dist-info/METADATA").decode()
        licence = archive.read("dreamgym_lg-0.1.0.dist-info/licenses/LICENSE").decode()

    assert "License-Expression: Apache-2.0" in metadata
    assert licence == (ROOT / "LICENSE").read_text()
    assert set(re.findall(r"^Provides-Extra: (\w+)$", metadata, re.M)) == {
        "train", "textworld", "openai", "report", "alfworld", "browsergym", "webshop", "tau",
        "docs", "serve", "demo", "dev", "all", "ui", "mcp", "gepa", "tinker", "openenv",
    }  # fmt: skip


def test_all_installs_what_a_user_wants_and_no_development_tool() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        """The names of what an extra installs, the extras that it refers to resolved."""
        found: set[str] = set()
        for requirement in extras[extra]:
            if nested := re.match(r"dreamgym-lg\[(.+)\]", requirement):
                found |= {package for each in nested[1].split(",") for package in packages(each)}
            else:
                found.add(re.split(r"[<>=]", requirement)[0])
        return found

    chosen = ("demo", "gepa", "mcp", "openai", "serve", "ui", "browsergym", "tau", "webshop")
    wanted = {name for each in chosen for name in packages(each)}
    assert packages("all") == wanted and {"trl", "langchain-openai", "openai", "langchain"} <= wanted
    assert not {"pytest", "mypy", "ruff", "deepagents", "langchain-tests", "mkdocs-material"} & packages("all")
    assert {"pytest", "langchain-openai", "mkdocs-material"} <= packages("dev")


def test_the_sdist_holds_what_the_wheel_is_built_from(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert set(shipped().values()) <= names
    assert not {name for name in names if name.startswith("cookbook/")}


def test_the_installed_wheel_imports_from_its_own_files(installed: Path) -> None:
    files = run(
        installed / "bin/python",
        "-c",
        f"{CORE_IMPORTS}, dreamgym_lg.integrations, dreamgym_lg.integrations.trl, sys\n"
        "print(*(module.__file__ for name, module in sys.modules.items() if name.startswith('dreamgym_lg')))",
        cwd=installed,
    ).split()

    assert len(files) > 5
    assert all(Path(file).is_relative_to(installed) for file in files)


def test_the_installed_command_answers(installed: Path) -> None:
    assert "Usage: dreamgym" in run(installed / "bin/dreamgym", "--help", cwd=installed)


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader of the README has: an agent, its traces and, in the cache of the hub, the model (here: tiny weights)."""
    from tiny_models import create_model, create_tokenizer

    from dreamgym_lg.integrations.trl.sft import save_model

    folder = tmp_path_factory.mktemp("reader")
    call = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"city": "Rome"}'}}
    told = [{"role": "user", "content": "Book."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    told += [{"role": "tool", "tool_call_id": "c1", "content": "booked"}, {"role": "assistant", "content": "done"}]
    (folder / "traces.jsonl").write_text(json.dumps({"messages": told, "reward": 1}) + "\n")
    shutil.copy(ROOT / "tests" / "my_app.py", folder)
    tokenizer = create_tokenizer(["Book a room in Rome. done"] * 9, vocab_size=320)
    hub = folder / "home" / "hub" / "models--Qwen--Qwen2.5-7B-Instruct"
    save_model(create_model(tokenizer, hidden_size=32, layers=1), tokenizer, hub / "snapshots" / "0")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0")
    return folder


def test_the_installed_wheel_runs_the_readme(installed: Path, readers_folder: Path) -> None:
    """Every block, but for `make`, which is of a clone, and `pip install`. The hosted model is a server on this machine."""
    readme = (ROOT / "README.md").read_text()
    programs, commands = (re.findall(rf"^```{kind}\n(.*?)^```", readme, re.M | re.S) for kind in ("python", "bash"))
    answer = {"reasoning": "so", "valid": True, "reward": 0, "terminated": True, "success": False, "observation": ""}
    sys.path.insert(0, str(ROOT / "tests" / "hosted"))
    try:
        from chat_server import ChatServer
    finally:
        sys.path.pop(0)
    server = ChatServer(lambda messages: json.dumps(answer)).start()
    variables = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "sk-none", "HF_HOME": str(readers_folder / "home")}
    try:
        for program in programs:  # the reader has two traces, which the gate refuses to judge a dream by
            program = program.replace("iterations=100)", "iterations=100, force=True)")
            run(installed / "bin/python", "-c", program, cwd=readers_folder, **variables)
    finally:
        server.stop()
    assert server.requests and (readers_folder / "policies/support-v1/manifest.json").exists()
    lines = [line for block in commands for line in block.splitlines() if line.startswith("dreamgym ")]
    for line in lines:
        line = line.replace("--writes refund", "--writes book")  # the reader's own tool
        run(installed / "bin/dreamgym", *shlex.split(line, comments=True)[1:], cwd=readers_folder)
    assert len(lines) == 3
    assert not (readers_folder / "booked.txt").exists()


@pytest.mark.parametrize("statement", ["import dreamgym_lg", CORE_IMPORTS])
def test_importing_the_core_loads_no_heavy_package(statement: str, tmp_path: Path) -> None:
    loaded = run(sys.executable, "-c", f"{statement}, sys; print(*sys.modules)", cwd=tmp_path).split()

    assert "dreamgym_lg" in loaded
    assert sorted(HEAVY & set(loaded)) == []


def test_importing_dreamgym_lg_costs_little_more_than_langgraph(tmp_path: Path) -> None:
    """Processor seconds, the least of three alternated tries each: a busy machine slows both alike."""
    times: dict[str, list[float]] = {"langgraph.graph": [], "dreamgym_lg": []}
    for _ in range(3):
        for name, seconds in times.items():
            timed = f"import {name}, time; print(time.process_time())"
            seconds.append(float(run(sys.executable, "-c", timed, cwd=tmp_path)))

    assert min(times["dreamgym_lg"]) < 3 * min(times["langgraph.graph"])
    assert min(times["dreamgym_lg"]) < 2, "a second on a quiet machine"


def shipped() -> dict[str, str]:
    """Path in the wheel -> path in the repository, of each module, template and marker."""
    return {
        f"{target}/{path.relative_to(ROOT / folder)}": str(path.relative_to(ROOT))
        for folder, target in SHIPPED.items()
        for path in source_files(ROOT / folder)
    }


def source_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
