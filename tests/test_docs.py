"""The documentation: the site builds without a warning, every block of it runs, and its list of names is the code's.

The same holds for README.md, whose Python blocks are blocks of the site.
"""

import ast
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import typer.main
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

import dreamgym_lg
from dreamgym_lg import DreamGym, ReplayBuffer, load_traces
from dreamgym_lg.cli.app import app
from dreamgym_lg.experiment.advice import Advice
from dreamgym_lg.experiment.agent_world import AgentWorld

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMED = {str(page.relative_to(ROOT)): page for page in [README, ROOT / "CONTRIBUTING.md", *PAGES]}
PLAIN = {"text", "json"}
"""Kinds of blocks that are shown and not run."""


def blocks(page: Path, kind: str) -> list[str]:
    return [text for named, text in all_blocks(page) if named == kind]


def all_blocks(page: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return found


COMMANDS = sorted(
    {line.partition(" #")[0].strip() for page in NAMED.values() for text in blocks(page, "bash") for line in text.splitlines()}
)
WITH_PYTHON = [name for name, page in NAMED.items() if page != README and blocks(page, "python")]
OF_A_RUN = [name for name in WITH_PYTHON if any("runs/mine" in text for text in blocks(NAMED[name], "python"))]


@pytest.mark.parametrize("name", NAMED)
def test_every_block_is_of_a_kind_that_is_run_or_plain(name: str) -> None:
    assert {kind for kind, _ in all_blocks(NAMED[name])} <= {"bash", "python", *PLAIN}


def test_the_pages_have_blocks() -> None:
    assert len(COMMANDS) >= 20 and len(WITH_PYTHON) >= 6
    assert blocks(README, "bash") and blocks(README, "python")


def test_the_readme_shows_no_python_that_the_site_does_not_run() -> None:
    assert set(blocks(README, "python")) <= {text for page in PAGES for text in blocks(page, "python")}


def test_get_started_lists_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/index.md").read_text(), re.M)
    assert sorted(listed) == sorted(extras.keys() - {"dev", "docs"})


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists_with_these_options(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("replay.db", "traces.jsonl", "my_app.py"):
        (tmp_path / name).touch()
    program, name, *arguments = shlex.split(command)
    if program == "make":
        assert subprocess.run(["make", "-n", name], cwd=ROOT, capture_output=True).returncode == 0
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        own = re.fullmatch(r"\.\[(.+)\]", arguments[-1])
        assert name == "install"
        assert set(own[1].split(",")) <= set(extras) if own else arguments[-1] in (ROOT / "Makefile").read_text()
    else:
        assert program == "dreamgym"
        group = typer.main.get_command(app)
        group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


# --- Python -----------------------------------------------------------------------------------------------------------------

ANSWER = "valid, it completes the task\nreward 1, success\nYou take the orange."


def replies(*texts: str) -> GenericFakeChatModel:
    return GenericFakeChatModel(messages=iter([AIMessage(text) for text in texts * 99]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy in place of Qwen."""
    from tiny_models import create_model, create_tokenizer

    from dreamgym_lg.integrations.trl.sft import save_model

    tokenizer = create_tokenizer(["Book a room in Rome. done"] * 9, vocab_size=320)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_model(create_model(tokenizer, hidden_size=32, layers=1), tokenizer, folder)
    return folder


@pytest.fixture
def scene(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an agent and its traces. Of a hosted model the replies are scripted; training is one short iteration."""
    import langchain.chat_models

    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    train = DreamGym.train
    policy = LocalChatModel.from_path(tiny, max_new_tokens=8)
    world = replies("valid, it ends\nreward 0, failure\n(nothing)")
    monkeypatch.setattr(langchain.chat_models, "init_chat_model", lambda *_, **__: world)
    monkeypatch.setattr(
        DreamGym, "train", lambda gym, *_, **__: train(gym, policy, 1, num_tasks=1, num_generations=2, force=True)
    )
    # tests/test_gym_supervised.py and tests/experiment run these four
    for stage, returned in {"train_base": None, "advise": Advice("train", "it may add to it")}.items():
        monkeypatch.setattr(DreamGym, stage, create_autospec(getattr(DreamGym, stage), return_value=returned))

    def prepare(gym: DreamGym, *_: Any, **__: Any) -> None:
        gym.experiment._experience_model = world
        policy.save(gym.experiment.models / "base")

    for stage in ("train_experience", "prepare"):
        monkeypatch.setattr(DreamGym, stage, create_autospec(getattr(DreamGym, stage), side_effect=prepare))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    (tmp_path / "scratch").mkdir()
    shutil.copy(Path(__file__).with_name("my_app.py"), tmp_path)
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(trace(city)) + "\n" for city in ("Rome", "Oslo")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_app", raising=False)
    return tmp_path


def trace(city: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": json.dumps({"city": city})}}
    messages = [
        {"role": "user", "content": f"Book a room in {city}."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "booked"},
        {"role": "assistant", "content": "done"},
    ]
    return {"messages": messages, "reward": 1}


@pytest.mark.slow
@pytest.mark.usefixtures("scene")
@pytest.mark.parametrize("name", [name for name in WITH_PYTHON if name not in OF_A_RUN])
def test_python_blocks_run(name: str) -> None:
    if name == "docs/how-to/prompts.md":
        pytest.importorskip("gepa", reason="needs pip install 'dreamgym-lg[gepa]'")
    run_blocks(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_A_RUN)
def test_python_blocks_of_a_finished_experiment_run(
    name: str, finished_run: Path, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stages have nothing left to do."""
    from dreamgym_lg.cli.experiment import open_folder

    (scene / "runs").mkdir()
    (scene / "runs" / "mine").symlink_to(finished_run)
    settings = open_folder(finished_run).settings
    monkeypatch.setattr("dreamgym_lg.integrations.textworld_express.world.TextWorldExpressWorld.settings", settings)
    run_blocks(name)


def run_blocks(name: str) -> None:
    """A page's blocks, in order, in one namespace, in which `model` and `policy` are chat models."""
    namespace: dict[str, Any] = {"model": replies(ANSWER), "policy": replies("take orange")}
    for text in blocks(NAMED[name], "python"):
        exec(compile(text, name, "exec"), namespace)
    if check := CHECKS.get(name):
        check(namespace)


def check_agent(namespace: dict[str, Any]) -> None:
    from langgraph.pregel import Pregel

    from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

    assert isinstance(namespace["agent"], Pregel)
    assert LocalChatModel.from_path("policies/support-v1").invoke("hi").usage_metadata
    with ReplayBuffer("replay.db") as buffer:
        episode, _ = buffer.trajectories(iteration=0, segments=True, source="synthetic")
    assert episode.source == "synthetic" and episode.segments[0].trainable > 0
    assert not Path("booked.txt").exists(), "nothing real runs in the dream"


def check_proof(namespace: dict[str, Any]) -> None:
    (episode,) = namespace["episodes"]
    assert episode.source == "real" and namespace["rate"].episodes == 1


def check_canary(namespace: dict[str, Any]) -> None:
    log = namespace["log"]
    assert sum(side.success is not None for side in log.state("support-v1").served.values()) == 1


def check_hosted(namespace: dict[str, Any]) -> None:
    assert namespace["hosted"].limits["cost"] == 20.0 and namespace["experience"].hosted is namespace["hosted"]


def check_local(namespace: dict[str, Any]) -> None:
    assert isinstance(namespace["gym"].world, AgentWorld)
    stages: list[Any] = [DreamGym.train_experience, DreamGym.train_base, DreamGym.prepare]
    assert [stage.call_count for stage in stages] == [1, 1, 1]
    (episode,) = namespace["episodes"]
    assert episode.source == "real" and episode.task.id == "t1" and len(namespace["gym"].tasks("train")) == 2


def check_prompts(namespace: dict[str, Any]) -> None:
    assert str(namespace["improved"]) == "no text did better than the original", "the scripted dream rewards nothing"
    assert json.loads(Path("exports/prompts/manifest.json").read_text())["prompts"] == {}


def check_world(namespace: dict[str, Any]) -> None:
    assert namespace["state"]["success"]
    assert namespace["policy"].invoke("read").text is not None


CHECKS = {
    "docs/how-to/agent.md": check_agent,
    "docs/how-to/canary.md": check_canary,
    "docs/how-to/hosted-model.md": check_hosted,
    "docs/how-to/local-model.md": check_local,
    "docs/how-to/prompts.md": check_prompts,
    "docs/how-to/prove.md": check_proof,
    "docs/how-to/world.md": check_world,
}
"""What holds after a page's blocks have run."""


@pytest.mark.parametrize("number", range(5))
def test_the_exports_that_the_documentation_shows_are_read(number: int, tmp_path: Path) -> None:
    shown = blocks(ROOT / "docs/how-to/traces.md", "json")
    assert len(shown) == 5
    (tmp_path / "traces.json").write_text(shown[number])
    (trajectory,) = load_traces(tmp_path / "traces.json")
    assert trajectory.task.instruction == "Book a room in Rome." and trajectory.success and trajectory.reward == 1
    call, answer = trajectory.steps
    assert json.loads(call.action) == {"name": "book", "arguments": {"city": "Rome"}} and answer.observation == "booked"
    assert json.loads(answer.action) == {"answer": "Your room is booked."}


# --- names ------------------------------------------------------------------------------------------------------------------


def public_names() -> list[str]:
    """The public names, as docs/reference/index.md lists them."""
    return re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/reference/index.md").read_text(), re.M)


def described_names() -> set[str]:
    """The dotted names that the pages of the reference describe."""
    return {name for page in PAGES for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.M)}


def test_the_public_names_are_at_most_thirty_and_those_of_the_code() -> None:
    names = public_names()
    assert sorted(names) == sorted(dreamgym_lg.__all__) and len(set(names)) == len(names) <= 30
    assert all(getattr(dreamgym_lg, name) is not None for name in names)


def test_the_reference_describes_every_public_name_and_no_other() -> None:
    errors = {name for name in described_names() if name.startswith("dreamgym_lg.errors.")}
    tree = ast.parse((ROOT / "dreamgym_lg/errors.py").read_text())
    assert {name.rpartition(".")[2] for name in errors} == {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    described = {name.rpartition(".")[2] for name in described_names() - errors}
    assert described == set(public_names()) - {"DreamGymError"}


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_the_documentation_imports_what_is_there(name: str) -> None:
    """Public names from the package itself, others from their modules."""
    for text in blocks(NAMED[name], "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dreamgym_lg"):
                names = {alias.name for alias in node.names}
                if node.module == "dreamgym_lg":
                    assert names <= set(public_names())
                elif node.module:
                    assert not names & set(public_names()), "a public name is imported from the package"
                    assert all(hasattr(import_module(node.module), each) for each in names)


# --- the site ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("material", "mkdocstrings")), reason="needs pip install 'dreamgym-lg[docs]'"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference/agents/index.html").read_text()
    assert "Trains the policy of an unmodified LangGraph agent in a dream" in reference, "docstrings are missing"
    missing = [page for page in PAGES if not built(tmp_path, page).exists()]
    assert not missing


def built(site: Path, page: Path) -> Path:
    name = page.relative_to(ROOT / "docs").with_suffix("")
    return site / (name.parent if name.name == "index" else name) / "index.html"


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in target]
    assert targets and not [target for target in targets if not (ROOT / target).exists()]


def test_the_readme_and_the_concepts_are_short() -> None:
    """Words are what lies between blanks, in tables and blocks too."""
    text = README.read_text()
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 900
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert cells and not [cell for cell in cells if len(cell.split()) > 12]
    concepts = sorted((ROOT / "docs/concepts").glob("*.md"))
    assert concepts and not [page.name for page in concepts if len(page.read_text().split()) > 500]


@pytest.mark.parametrize("name", ["index", "users", "hosted-models", "speed"])
def test_a_results_page_begins_with_its_current_table(name: str) -> None:
    """What came before it is in history.md."""
    begin, table, _ = (ROOT / f"docs/results/{name}.md").read_text().partition("\n|")
    assert table and "\n## " not in begin and len(begin.split()) < 120


@pytest.mark.parametrize("page", sorted((ROOT / "docs/concepts").glob("*.md")), ids=lambda page: page.stem)
def test_a_concept_has_a_picture(page: Path) -> None:
    pictures = re.findall(r"^!\[.+\]\((.+)\)$", page.read_text(), re.M)
    assert pictures and all((page.parent / picture).exists() for picture in pictures)


def test_the_pictures_are_what_the_code_draws_now() -> None:
    """The method's nodes and edges are those of the compiled graph."""
    diagrams = runpy.run_path(str(ROOT / "docs/diagrams.py"))
    drawn = {f"{name}.svg": picture() for name, picture in diagrams["PICTURES"].items()}
    stored = {file.name: file.read_text() for file in (ROOT / "docs/diagrams").iterdir()}
    assert drawn == stored, "python docs/diagrams.py draws them anew"
    assert all(f">{node}<" in stored["method.svg"] for node in ("curriculum", "rollout", "update_policy", "evaluate", "count"))


def test_every_command_is_documented() -> None:
    shown = {name for command in COMMANDS for name in re.findall(r"^dreamgym (\S+)", command)}
    assert set(typer.main.get_command(app).commands) == shown  # type: ignore[attr-defined]


def test_first_sentences_of_docstrings_are_short_statements() -> None:
    long = []
    for file in (file for folder in ("dreamgym_lg", "graphs", "integrations") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                sentence = re.split(r"(?<=[.])\s|\n\n", ast.get_docstring(node) or "", maxsplit=1)[0]
                if len(sentence.split()) > 15 or re.match(r"(What|Whether|Which)\b", sentence):
                    long.append(f"{file.relative_to(ROOT)}: {sentence}")
    assert not long, "at most 15 words, none begins with What, Whether or Which"
