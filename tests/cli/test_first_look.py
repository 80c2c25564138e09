"""The road before training: `dreamgym try`, then the train.py of `dreamgym init`."""

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
from typer.testing import CliRunner

from dreamgym_lg import DreamGym, LocalChatModel, ReplayBuffer, load_traces
from dreamgym_lg.cli.app import app
from dreamgym_lg.dream import RecordedUser
from dreamgym_lg.experiment.advice import Advice
from dreamgym_lg.experiment.agent_world import dream_of_traces
from dreamgym_lg.simulate.wall.wall import missing_for_wall

pytest.importorskip("langchain", reason="needs langchain")
DESK = Path(__file__).parents[2] / "cookbook" / "support_desk"
WRITES = ("refund", "cancel", "set_city", "escalate")


def newcomer(folder: Path, agent: str, *, talking: bool = False) -> Path:
    """A newcomer's folder: an agent, which `agent` imports and builds as `graph`, and 60 traces of it."""
    sys.path.insert(0, str(DESK))
    try:
        from old_policy import write_traces
        from tickets import Shop, create_shop
    finally:
        sys.path.remove(str(DESK))
    tasks = create_shop(folder / "shop.db", seed=2, train=60, vague=talking, validation=0, test=0)
    write_traces(folder / "traces.jsonl", Shop(folder / "shop.db"), tasks, seed=2, talking=talking)
    (folder / "my_app.py").write_text(f"import sys\nsys.path.insert(0, {str(DESK)!r})\n{agent}\n")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    agent = "from agent import create_desk\nfrom old_policy import OldPolicy\ngraph = create_desk(OldPolicy(habit='good'))"
    return newcomer(tmp_path_factory.mktemp("newcomer"), agent)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return newcomer(tmp_path_factory.mktemp("talking"), "from old_policy import talking_desk as graph", talking=True)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, writes: Sequence[str] = WRITES) -> Any:
    monkeypatch.chdir(folder)
    named = [each for tool in writes for each in ("--writes", tool)]
    return CliRunner().invoke(app, [arguments[0], "my_app.py:graph", "traces.jsonl", *named, *arguments[1:]])


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason="a compiled world needs the wall")
def test_an_agent_is_tried_before_anybody_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(folder, monkeypatch, "try", "--tasks", "8")
    output = " ".join(result.output.split())
    assert result.exit_code == 0, output
    assert "60 traces read: " in output and "tasks are judged by a recorded success" in output
    assert "in the dream: success " in output and "on 8 tasks" in output
    assert output.count("what happened") == 3 and "those of a recorded success" in output
    assert "set_city is not among them: no rule answers any of its " in output and "REPLAY.md" in output
    assert "answered by: " in output and "the gate would let you train in this dream; no judge could be measured" in output
    assert "cost: the agent's model " in output and "the dream asked no hosted model" in output
    named = " ".join(f"--writes {tool}" for tool in WRITES)
    assert f"next: dreamgym init my_app.py:graph traces.jsonl {named}" in output


@pytest.mark.slow
def test_an_imported_buffer_is_tried_and_each_try_plays_the_agent_as_it_is_now(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second try used to show the stored episodes of the first."""
    monkeypatch.chdir(folder)
    assert CliRunner().invoke(app, ["import", "traces.jsonl", "--to", "imported.db"]).exit_code == 0
    for _ in range(2):
        result = CliRunner().invoke(
            app, ["try", "my_app.py:graph", "imported.db", "--tasks", "2", "--out", "runs/again", "--isolation", "guard"]
        )
        assert result.exit_code == 0, result.output
    with ReplayBuffer(folder / "runs/again/replay.db") as buffer:
        assert len({each.run for each in buffer.trajectories(source="synthetic")}) == 2


@pytest.mark.slow
def test_without_the_tools_that_write_recorded_answers_alone_are_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(folder, monkeypatch, "try", "--tasks", "4", "--out", "runs/other", writes=())
    output = " ".join(result.output.split())
    assert result.exit_code == 0, output
    assert "recorded answers alone answer: nothing could be compiled" in output and "(--writes)" in output
    assert "in the dream: success " in output and "on 4 tasks" in output


@pytest.mark.slow
def test_a_writing_tool_that_there_is_not_ends_the_try_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(folder, monkeypatch, "try", "--out", "runs/typo", "--isolation", "guard", writes=("refunds",))
    output = " ".join(result.output.split())
    assert result.exit_code == 2 and "Did you mean 'refund'?" in output and "compiled" not in output


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason="a compiled world needs the wall")
def test_init_writes_a_training_that_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stages are those of a user, but for the size: one iteration of a small policy, and no imitation before it."""
    tiny_models = pytest.importorskip("tiny_models")
    result = run(folder, monkeypatch, "init", "--to", "train.py")
    assert result.exit_code == 0, result.output
    text = (folder / "train.py").read_text()
    assert 'WRITES = ["cancel", "escalate", "refund", "set_city"]' in text and "# experience_model=" in text
    tokenizer = tiny_models.create_tokenizer(["refund the order of the user"] * 9, vocab_size=320)
    model = tiny_models.create_model(tokenizer, hidden_size=32, layers=1)
    policy, train = LocalChatModel(model=model, tokenizer=tokenizer, max_new_tokens=8), DreamGym.train
    prepare = create_autospec(DreamGym.prepare)
    monkeypatch.setattr(DreamGym, "prepare", prepare)
    advise = create_autospec(DreamGym.advise, return_value=Advice("train", "it may add to it"))
    monkeypatch.setattr(DreamGym, "advise", advise)

    def train_little(gym: DreamGym, iterations: int) -> None:
        assert advise.return_value.verdict == "train"
        train(gym, policy, 1, num_tasks=1, num_generations=2, stop_after_uniform=0)

    monkeypatch.setattr(DreamGym, "train", train_little)
    gym = runpy.run_path("train.py", run_name="__main__")["gym"]
    assert prepare.call_count == advise.call_count == 1 and (folder / "policies/mine/manifest.json").exists()
    assert gym.experiment.settings.references_only
    assert {split: len(gym.tasks(split)) > 5 for split in ("train", "validation", "test")} == dict.fromkeys(
        ("train", "validation", "test"), True
    )
    assert {each.source for each in gym.replay_buffer.trajectories(segments=True) if each.segments} == {"synthetic"}
    again = run(folder, monkeypatch, "init", "--to", "train.py")
    assert again.exit_code == 2 and "train.py exists" in again.output
    real = text.replace("REAL = False", "REAL = True")
    for call in ("reset your staging system here", "look into your staging system here"):
        real = real.replace(f'raise NotImplementedError("{call}")', "return 1.0" if "look" in call else "pass")
    (folder / "train.py").write_text(real)
    monkeypatch.setattr(DreamGym, "prove", prove := create_autospec(DreamGym.prove))
    monkeypatch.setattr(DreamGym, "export", export := create_autospec(DreamGym.export))
    advise.return_value = Advice("stop", "imitation is enough")
    gym = runpy.run_path("train.py", run_name="__main__")["gym"]
    assert prove.call_count == export.call_count == 1, "also where nothing is trained"
    assert gym.experiment.settings.real_budget is None, "as the comment beside REAL says"


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason="a compiled world needs the wall")
def test_the_users_of_recorded_conversations_talk(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(talking, monkeypatch, "try", "--tasks", "8")
    output = " ".join(result.output.split())
    assert result.exit_code == 0, output
    assert "the traces are conversations: their users talk" in output and "the user" in output and "on 8 tasks" in output
    assert run(talking, monkeypatch, "init", "--to", "train.py").exit_code == 0
    gym = runpy.run_path("train.py")["gym"]
    assert isinstance(gym.world.user, RecordedUser)
    dream = gym.experiment.dream()
    assert sum(dream.decides_by_traces(task) for task in gym.tasks("train")) > 5


@pytest.mark.slow
def test_a_try_of_other_traces_begins_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (folder / "traces.jsonl").read_text().splitlines(keepends=True)
    monkeypatch.chdir(folder)
    outputs = []
    for name, own in (("first", lines[:30]), ("second", lines[30:]), ("third", lines[10:40])):
        Path(f"{name}.jsonl").write_text("".join(own))
        options = ["--out", "runs/anew", "--isolation", "guard", "--tasks", "2"]
        outputs.append(CliRunner().invoke(app, ["try", "my_app.py:graph", f"{name}.jsonl", *options]).output)
    assert "are set aside" not in outputs[0] and "30 other traces of an earlier try are set aside" in " ".join(
        outputs[1].split()
    )
    for name, file in (("first", "earlier.db"), ("second", "earlier1.db"), ("third", "replay.db")):
        with ReplayBuffer(folder / "runs/anew" / file) as buffer:
            stored = {each.task.instruction for each in buffer.trajectories(source="offline")}
        assert stored == {each.task.instruction for each in load_traces(f"{name}.jsonl")}


@pytest.mark.slow
def test_init_names_the_model_and_the_buffer_that_it_was_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    ReplayBuffer("stored.db").extend(load_traces("traces.jsonl"))
    named = ["--experience-model", "openai:gpt-5.4-mini", "--to", "hosted.py", "--isolation", "guard", "--writes", "refund"]
    named += ["--pass-through", "get_order"]
    result = CliRunner().invoke(app, ["init", "my_app.py:graph", "stored.db", *named])
    assert result.exit_code == 0, result.output
    text = (folder / "hosted.py").read_text()
    assert '\n    experience_model="openai:gpt-5.4-mini",' in text and "\n    # dream=" in text
    assert 'ReplayBuffer("stored.db")' in text and "\n# replay_buffer.extend" in text
    assert '\nOPTIONS = dict(isolation="guard", pass_through=["get_order"])' in text and "\n    **OPTIONS,\n" in text
    ast.parse(text)


@pytest.mark.slow
def test_init_has_a_stub_of_the_context_that_the_agent_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "in_context.py").write_text(IN_CONTEXT)
    named = ["in_context.py:graph", "traces.jsonl", "--isolation", "guard"]
    result = CliRunner().invoke(app, ["init", *named, "--to", "in_context_train.py"])
    assert result.exit_code == 0 and "fill in `CONTEXT`" in " ".join(result.output.split()), result.output
    text = (folder / "in_context_train.py").read_text()
    assert "\nCONTEXT = dict(user_id=FILL_IN, tier=FILL_IN)" in text and text.count("context=CONTEXT") == 2
    ast.parse(text)
    result = CliRunner().invoke(app, ["try", *named, "--out", "runs/in_context"])
    assert result.exit_code == 2 and "dreamgym init writes the line" in " ".join(result.output.split())


IN_CONTEXT = """
from dataclasses import dataclass
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

@dataclass
class Ctx:
    user_id: str
    tier: int

@tool
def read_order(id: str) -> str:
    "Read an order."

graph = StateGraph(MessagesState, context_schema=Ctx).add_node("t", ToolNode([read_order])).add_edge(START, "t").compile()
"""


@pytest.mark.slow
def test_a_try_names_payload_for_a_graph_without_messages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "questions.py").write_text(QUESTIONS)
    named = ["questions.py:graph", "traces.jsonl", "--tasks", "1", "--isolation", "guard", "--out", "runs/questions"]
    output = " ".join(CliRunner().invoke(app, ["try", *named]).output.split())
    assert (
        "KeyError: 'question'" in output
        and "its state has question, answer and no `messages`: give DreamGym payload=" in output
    )
    shown = CliRunner().invoke(app, ["doctor", "questions.py:graph", "--isolation", "guard"], env={"COLUMNS": "999"}).output
    assert "no `messages`: give DreamGym payload=" in " ".join(shown.split())


QUESTIONS = """
from typing import TypedDict
from langchain_core.language_models import GenericFakeChatModel
from langgraph.graph import START, StateGraph

class QA(TypedDict):
    question: str
    answer: str

model = GenericFakeChatModel(messages=iter([]))

def answer(state):
    return {"answer": model.invoke(state["question"]).text}

graph = StateGraph(QA).add_node("reply", answer).add_edge(START, "reply").compile()
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_for_wall()), reason="a compiled world needs the wall")
def test_an_experience_model_answers_behind_the_compiled_code(
    folder: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    said, chat = list[str](), scripted(reply=lambda _: "")
    with ReplayBuffer(":memory:") as buffer:
        buffer.extend(load_traces("traces.jsonl"))
        for writes in (WRITES, None):
            dream = dream_of_traces(
                "my_app.py:graph", buffer, tmp_path / "world", experience_model=chat, writes=writes, say=said.append
            )
            parts = ["schema", "recorded", *(["compiled"] if writes else []), "model"]
            judges = [*(["compiled"] if writes else []), "references", "model"]
            assert ([each.name for each in dream.responders], [each.name for each in dream.judges]) == (parts, judges)
    assert "recorded answers and the experience model the others" in said[0]
    assert said[-1].startswith("recorded answers and the experience model answer: nothing could be compiled")
