"""BFCL multi-turn, on its real data and real API classes."""

import json
import subprocess
import sys

import pytest

from dreamgym_lg.actions import ToolCall, render_call
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.types import Task

pytest.importorskip("bfcl_eval", reason="no bfcl_eval; run: pip install --no-deps bfcl-eval")
pytest.importorskip("mpmath", reason="no mpmath; run: pip install 'dreamgym-lg[bfcl]'")
pytest.importorskip("langchain", reason="no langchain; run: pip install 'dreamgym-lg[bfcl]'")

from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

from dreamgym_lg.integrations.bfcl import (
    CATEGORIES,
    BFCLApis,
    check_call,
    ground_truth,
    load_tasks,
)
from dreamgym_lg.integrations.bfcl.apis import allowed_values, arguments_schema
from dreamgym_lg.integrations.bfcl.data import UNSOLVABLE, documents, parse_call


def written(call: ToolCall) -> str:
    """The call in Python, as BFCL executes it."""
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def task_of(number: int, category: str = "multi_turn_base") -> Task:
    return next(task for task in load_tasks(category) if task.id == f"{category}_{number}")


# --- tasks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("category", CATEGORIES)
def test_tasks_are_serialisable_and_split_alike_in_every_category(category: str) -> None:
    tasks = load_tasks(category)
    assert len(tasks) == 200 - sum(entry.startswith(f"{category}_") for entry in UNSOLVABLE)
    assert all(json.loads(json.dumps(task.metadata)) == task.metadata for task in tasks)
    assert all(task.environment == "bfcl" and task.metadata["user_turns"][0] in task.instruction for task in tasks)
    by_split = {split: load_tasks(category, split=split) for split in ("train", "validation", "test")}
    assert {task.id for some in by_split.values() for task in some} == {task.id for task in tasks}
    assert 100 < len(by_split["train"]) < 140 and min(len(by_split["validation"]), len(by_split["test"])) > 25
    splits = {task.id.rpartition("_")[2]: task.split for task in load_tasks()}
    assert all(splits[task.id.rpartition("_")[2]] == task.split for task in tasks)  # variants of a scenario stay together


def test_no_task_shows_its_ground_truth() -> None:
    task = task_of(0)
    assert "ground_truth" not in json.dumps(task.metadata) and "cd(" not in json.dumps(task.metadata)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'multi_turn_base'"):
        load_tasks("multi_turn_bas")
    with pytest.raises(ConfigurationError, match="unknown split"):
        load_tasks(split="dev")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="metadata\\['entry_id'\\]"):
        BFCLApis(Task(id="x", instruction="", environment="bfcl"))


def test_ground_truth_names_positional_arguments() -> None:
    assert parse_call("sort('a.pdf')", ["TwitterAPI", "GorillaFileSystem"]) == ToolCall("sort", {"file_name": "a.pdf"})
    assert parse_call("ls(a=True)", ["GorillaFileSystem"]) == ToolCall("ls", {"a": True})
    for wrong in ("sort(", "sort", "fly('x')", "sort(open('x'))", "sort(1, 2, 3)"):
        with pytest.raises(ConfigurationError, match="is no call of a method"):
            parse_call(wrong, ["GorillaFileSystem"])


# --- worlds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("category", CATEGORIES)
def test_ground_truth_succeeds_without_an_error_and_nothing_else_does(category: str) -> None:
    calls = 0
    for task in load_tasks(category):
        turns, apis, idle = ground_truth(task), BFCLApis(task), BFCLApis(task)
        for turn, expected in enumerate(turns):
            for call in expected:
                assert check_call(task, render_call(*call), turn=turn) is None
                answer = apis.call(*call)
                assert answer.valid and "Error" not in answer.text[:6], (task.id, call, answer)
                calls += 1
            assert (apis.end_turn() is None) == (turn == len(turns) - 1) == (idle.end_turn() is None)
        assert apis.success() and apis.reward() == 1.0, task.id
        assert not idle.success() and idle.reward() == 0.0, task.id  # also where only information is asked for
    assert calls > 1100


@pytest.mark.parametrize("entry", sorted(UNSOLVABLE))
def test_entries_left_out_are_those_whose_tools_refuse_the_ground_truth(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dreamgym_lg.integrations.bfcl.data.UNSOLVABLE", frozenset())
    category, _, number = entry.rpartition("_")
    task = task_of(int(number), category)
    calls = [(turn, call) for turn, expected in enumerate(ground_truth(task)) for call in expected]
    assert any(check_call(task, render_call(*call), turn=turn) for turn, call in calls)


@pytest.mark.parametrize("category", CATEGORIES)
def test_answers_are_those_of_bfcl_itself(category: str) -> None:
    for task in load_tasks(category)[::4]:
        apis = BFCLApis(task)
        expected, _ = execute_multi_turn_func_call(
            [written(call) for turn in ground_truth(task) for call in turn],
            task.metadata["initial_config"],
            task.metadata["involved_classes"],
            "dreamgym_test",
            task.id,
            long_context="long_context" in category,
        )
        assert apis.reference.answers == expected


def test_wrong_order_gives_errors() -> None:
    failing = 0
    for task in load_tasks()[:60]:
        apis, turns = BFCLApis(task), ground_truth(task)
        answers = [apis.call(*call) for turn in reversed(turns) for call in reversed(turn)]
        failing += not all(answer.valid for answer in answers) and not apis.success()
    assert failing > 30


def test_worlds_share_no_state() -> None:
    task = next(task for task in load_tasks() if "TwitterAPI" in task.metadata["involved_classes"])
    config = json.dumps(task.metadata)
    one, other = BFCLApis(task), BFCLApis(task)
    login = {key: task.metadata["initial_config"]["TwitterAPI"][key] for key in ("username", "password")}
    posted = []
    for apis in (one, other):
        apis.call("authenticate_twitter", login)
        answer = json.loads(apis.call("post_tweet", {"content": "Hello"}).text)
        posted.append(answer)
        assert apis.call("mention", {"tweet_id": answer["id"], "mentioned_usernames": ["@ann"]}).valid
    assert posted[0] == posted[1] and posted[1]["mentions"] == []  # bfcl-eval's default argument is not carried over
    assert json.dumps(task.metadata) == config


def test_read_only_entries_need_the_answers() -> None:
    reading = [task for task in load_tasks() if BFCLApis(task).state_matches()]
    assert len(reading) == 11
    assert not any(BFCLApis(task).success() for task in reading)


def test_api_errors_and_exceptions_are_answers_marked_invalid() -> None:
    apis = BFCLApis(task_of(0))
    answer = apis.call("cat", {"file_name": "nowhere.txt"})
    assert answer == ('{"error": "cat: \'nowhere.txt\': No such file or directory"}', False)
    assert apis.call("cat", {}) == ("Error during execution: missing a required argument: 'file_name'", False)


def test_withheld_tools_work_from_their_turn_on() -> None:
    task = task_of(0, "multi_turn_miss_func")
    assert task.metadata["withheld"] == {"sort": 3}
    apis, call = BFCLApis(task), ("sort", {"file_name": "final_report.pdf"})
    refused = apis.call(*call)
    assert not refused.valid and refused.text.startswith("Error: sort is not a valid tool, try one of [")
    assert "sort" not in refused.text.partition("[")[2]
    assert check_call(task, render_call(*call), turn=2) == refused.text and check_call(task, render_call(*call)) is None
    assert [apis.end_turn() for _ in range(3)][-1] == "I have updated some more functions you can choose from. What about now?"
    assert "is not a valid tool" not in apis.call(*call).text


# --- schemas --------------------------------------------------------------------------------------------------------


def test_every_tool_states_its_documented_parameters() -> None:
    classes = sorted({name for task in load_tasks() for name in task.metadata["involved_classes"]})
    assert len(classes) == 8
    enums = 0
    for owner in classes:
        for name, document in documents(owner).items():
            schema, told = arguments_schema(owner, name).model_json_schema(), document["parameters"]
            assert set(schema.get("properties", {})) == set(told["properties"])
            assert set(schema.get("required", [])) == set(told["required"])
            enums += sum(bool(allowed_values(parameter)) for parameter in told["properties"].values())
    assert enums == 10


def test_absurd_precision_is_refused_instead_of_computed() -> None:
    task = next(task for task in load_tasks() if "MathAPI" in task.metadata["involved_classes"])
    for name, arguments in (
        ("logarithm", {"value": 2, "base": 10, "precision": 10**9}),
        ("power", {"base": 9, "exponent": 10**9}),
    ):
        assert "less than or equal to 1000" in (check_call(task, render_call(name, arguments)) or "")


# --- installation ---------------------------------------------------------------------------------------------------


def test_without_bfcl_eval_the_import_says_what_to_run() -> None:
    code = "import sys; sys.modules['bfcl_eval'] = None; import dreamgym_lg.integrations.bfcl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingDependency" in done.stderr and "pip install --no-deps bfcl-eval" in done.stderr
