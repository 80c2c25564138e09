"""Tasks load without a browser, without the network and without a site."""

import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("browsergym", reason="browsergym is not installed: pip install 'dreamgym-lg[browsergym]'")

from browser_parts import needs_webarena

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.integrations.browsergym import data
from dreamgym_lg.integrations.browsergym.data import SITES, check_sites, load_tasks
from dreamgym_lg.integrations.browsergym.world import BrowserGymWorld


def test_miniwob() -> None:
    tasks = load_tasks("miniwob", seeds=range(4))
    assert len(tasks) == 500 == len({task.id for task in tasks})
    assert len(load_tasks("miniwob")) == 125
    splits = Counter(task.split for task in tasks)
    assert 0.65 < splits["train"] / 500 < 0.85 and splits["validation"] > 25 and splits["test"] > 40
    login = load_tasks("miniwob", names=["login-user"], seeds=[3])[0]
    assert login.metadata == {"task": "miniwob.login-user"} and login.seed == 3 and login.instruction


def test_webarena_and_webarena_lite() -> None:
    needs_webarena()
    tasks, lite = load_tasks("webarena"), load_tasks("webarenalite")
    assert (len(tasks), len(lite)) == (812, 165) and {task.split for task in lite} == {"test"}
    templates = {split: {task.metadata["template"] for task in tasks if task.split == split} for split in ("train", "test")}
    assert templates["train"] and templates["test"] and not templates["train"] & templates["test"]
    assert all(0 <= task.metadata["webarena_id"] < 812 for task in lite)
    keys = {key for task in [*tasks, *lite] for key in task.metadata}
    assert keys == {"task", "sites", "start_url", "template", "webarena_id"}, "no answer is part of a task"


def test_the_worlds_of_webarena_have_all_tasks_by_default() -> None:
    """A limit for the seeds of MiniWoB++ cut their lists, at whose end Lite's own tasks stand."""
    needs_webarena()
    for name, test in (("webarena", 111), ("webarenalite", 165)):
        world = BrowserGymWorld(name)  # type: ignore[arg-type]
        assert len(world.tasks("test", limit=world.settings.tasks)) == test
    assert BrowserGymWorld().settings.tasks == 640


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("miniwobs",), "unknown benchmark 'miniwobs'.*Did you mean 'miniwob'"),
        (("miniwob", "names", ["login-usr"]), "unknown task of MiniWoB.*Did you mean 'login-user'"),
    ],
)
def test_what_is_unknown_is_named(arguments: Any, message: str) -> None:
    benchmark, *named = arguments
    with pytest.raises(ConfigurationError, match=message):
        load_tasks(benchmark, **dict([named] if named else []))


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="pip install --no-deps browsergym-webarena "):
        load_tasks("webarena")


def test_every_missing_site_is_named_at_once() -> None:
    addresses = dict.fromkeys(SITES, "http://localhost")
    check_sites(addresses)
    with pytest.raises(ConfigurationError, match="2 of 7 addresses are missing: set WA_REDDIT, WA_MAP$"):
        check_sites({**addresses, "WA_REDDIT": "", "WA_MAP": ""})
    with pytest.raises(ConfigurationError) as raised:
        check_sites({})
    assert all(name in str(raised.value) for name in SITES)


# --- WebArena-Lite's own evaluator -----------------------------------------------------------------------------------


@pytest.fixture
def evaluators(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The official module. Its package looks for the sites and for nltk's `punkt_tab`, which only the network has."""
    needs_webarena()
    nltk = pytest.importorskip("nltk")
    for name in SITES:
        monkeypatch.setenv(name, "http://localhost")
        monkeypatch.setenv(name.removeprefix("WA_"), "http://localhost")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with monkeypatch.context() as importing:
        importing.setattr(nltk.data, "find", lambda *args, **named: None)
        return pytest.importorskip("browsergym.webarenalite.evaluators")  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
def test_the_official_string_evaluator(evaluators: ModuleType, tmp_path: Path) -> None:
    rows = json.loads(data._installed("webarenalite").read_text())
    by_string = [row for row in rows if row["eval"]["eval_types"] == ["string_match"]]
    judged = [row for row in by_string if row["eval"]["reference_answers"].keys() <= {"exact_match", "must_include"}]
    assert len(judged) == 43, "those without a language model"
    file, accepted, rejected, by_word, malformed = tmp_path / "task.json", 0, 0, 0, 0
    for row in judged:
        file.write_text(json.dumps(row))
        evaluate = evaluators.evaluator_router(file)
        references = row["eval"]["reference_answers"]
        right = references["exact_match"] if "exact_match" in references else "; ".join(references["must_include"])

        def score(answer: str, evaluate: Any = evaluate) -> float:
            given = evaluators.StringEvaluator
            assert isinstance(evaluate.evaluators[0], given)
            return float(evaluate.evaluators[0]([{}, {"answer": answer}], file))

        try:
            accepted += score(right) == 1
            rejected += score("I could not find it.") == 0 == score("") and score(right[::-1] + "?") == 0
        except LookupError:  # a single letter or digit is looked for among the words, for which nltk needs `punkt_tab`
            by_word += 1
        except AssertionError:  # one reference is a text where the evaluator wants a list
            malformed += 1
    assert (accepted, rejected, by_word, malformed) in ((38, 38, 4, 1), (42, 42, 0, 1)), "the latter where `punkt_tab` is there"
