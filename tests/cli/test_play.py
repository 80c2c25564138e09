"""`dreamgym play`: a person in the dream, typed on standard input."""

import json
import os
import signal
import subprocess
import sys
from _thread import interrupt_main
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import typer
from langchain_core.messages import BaseMessage
from typer.testing import CliRunner, Result

import dreamgym_lg.cli.play as command
from dreamgym_lg.cli import experiment
from dreamgym_lg.cli.play import typed_action
from dreamgym_lg.dream import Model
from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.types import Step, Task, Trajectory

app = typer.Typer()
app.command()(command.play)

HOUSE = Task(id="house", instruction="Leave the house.", environment="house", observation="A closed door.")
BARN = Task(id="barn", instruction="Leave the barn.", environment="house", observation="A barn door.", split="test")
BOOK = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Book a table.",
        "parameters": {"required": ["at"], "properties": {"at": {"type": "string"}, "seats": {"type": "integer"}}},
    },
}
TABLE = Task(id="table", instruction="Book a table.", environment="phone", tools=[BOOK, "hang_up"])

Sit = Callable[..., Result]


def door(messages: list[BaseMessage]) -> str:
    """The experience model of a world of two steps: `open door`, then `go north`; `jump` fails it."""
    action = [line[2:] for line in messages[-1].text.split("\n") if line.startswith("> ")][-1]
    opened = any(message.type == "ai" and "The door is open." in message.text for message in messages)
    match action:
        case "open door":
            return "valid, it brings progress\nreward 0.5, continues\nThe door is open."
        case "go north" if opened:
            return "valid, it completes the task\nreward 0.5, success\nYou are outside."
        case "go north":
            return "valid, no progress yet\nreward 0, continues\nThe door is closed."
        case "jump":
            return "valid, it fails the task\nreward 0, failure\nYou broke a leg."
    return "invalid, it is not understood\nreward 0, continues\nWhat?"


@pytest.fixture
def sit(scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sit:
    """Types lines at `dreamgym play` on a buffer with these tasks; `asked` holds the experience model's prompts."""

    def start(*lines: str, tasks: Sequence[Task] = (HOUSE, BARN), reply: Any = door, options: Sequence[str] = ()) -> Result:
        with ReplayBuffer(tmp_path / "replay.db") as buffer:
            buffer.add_tasks(tasks)
        model = scripted(reply=reply)
        start.asked = model.asked  # type: ignore[attr-defined]
        monkeypatch.setattr(
            experiment, "load_experience_model", lambda name, buffer: Model(model, replay_buffer=buffer, version=name)
        )
        given = ["--replay-buffer", str(tmp_path / "replay.db"), "--experience-model", "test:door", *options]
        return CliRunner().invoke(app, given, input="\n".join(lines), env={"COLUMNS": "200"})

    return start


def recorded(folder: Path) -> list[Trajectory]:
    with ReplayBuffer(folder / "replay.db") as buffer:
        return list(buffer.trajectories(run="play"))


def test_a_person_is_told_which_part_decided(sit: Sit, tmp_path: Path) -> None:
    call, answer = ('{"arguments": {"at": "eight"}, "name": "book"}', '{"answer": "Booked."}')
    steps = [
        Step(observation="", action=call, next_observation="It is booked."),
        Step(observation="", action=answer, next_observation="", terminated=True),
    ]
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        buffer.add(Trajectory(task=TABLE, steps=steps, success=True))
    done = sit('book {"at": "eight"}', "/answer Booked.", tasks=[TABLE], reply=lambda _: "never asked")
    assert "It is booked." in done.output and "decided by a recorded answer" in done.output
    assert "success: reward 1" in done.output and "judged by a recorded success's writing calls" in done.output


def test_a_person_plays_the_dream_to_its_end(sit: Sit) -> None:
    done = sit("open door", "go north", "go on")
    assert done.exit_code == 0, done.output
    order = [
        "the dream test:door, answered by the tool's argument schema, a recorded answer, the experience model",
        "Leave the house.",
        "A closed door.",
        "The door is open.",
        "valid, it brings progress",
        "valid, reward 0, decided by the experience model, judged by the experience model\n",
        "You are outside.",
        "success: reward 1 in 2 actions",
        "the episode is over",
    ]
    places = [done.output.index(text) for text in order]
    assert places == sorted(places)


def test_failure_and_invalid_actions_are_marked(sit: Sit) -> None:
    done = sit("dance", "jump")
    assert "What?\ninvalid, it is not understood\ninvalid, reward 0" in done.output and "refused" not in done.output
    assert "failure: reward 0 in 2 actions" in done.output


def test_next_goes_on_to_another_task_until_there_is_none(sit: Sit) -> None:
    done = sit("open door", "/next", "/next", "never read")
    assert done.exit_code == 0 and "never read" not in done.output
    assert done.output.count("Leave the barn.") == 1 and done.output.count("Leave the house.") == 1


def test_what_is_recorded(sit: Sit, tmp_path: Path) -> None:
    sit("open door", "go north")
    assert recorded(tmp_path) == [], "nothing without --record"
    sit("open door", "go north", "/quit", "open door", options=["--record"])
    sit("dance", options=["--record"])
    sit("open door", options=["--record"])
    ended, left, again = recorded(tmp_path)
    assert ended.success and [step.action for step in ended.steps] == ["open door", "go north"] and ended.reward == 1
    assert not left.success and [(step.valid, step.truncated) for step in left.steps] == [(False, True)]
    assert [each.rollout_index for each in (ended, left, again)] == [0, 1, 2]
    assert {(each.source, each.experience_version, each.policy_version) for each in (ended, left, again)} == {
        ("synthetic", "test:door", "person")
    }
    assert ended.steps[0] == Step(
        observation="A closed door.",
        action="open door",
        next_observation="The door is open.",
        reasoning="valid, it brings progress",
        decided_by="model",
        judged_by="model",
    )
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        assert buffer.similar("A closed door.", "open door") == [], "a dream is not grounded in dreams"


def test_an_unreadable_answer_costs_nothing(sit: Sit) -> None:
    answers = iter(["hm", "hm"])

    def reply(messages: list[BaseMessage]) -> str:
        return next(answers, "") or door(messages)

    done = sit("open door", "open door", reply=reply)
    assert done.exit_code == 0 and "the experience model answered 'hm'" in done.output
    assert "The door is open." in done.output


def test_commands(sit: Sit) -> None:
    done = sit("/help", "/whi", "/answer done", "", "  ")
    assert done.exit_code == 0 and "task house (house, train)" in done.output
    assert done.output.count("An action is any text. /next goes on") == 4
    assert "/whi is no command here" in done.output and "/answer is no command here" in done.output
    assert sit.asked == []  # type: ignore[attr-defined]


def test_an_answer_cannot_steer_the_terminal(sit: Sit) -> None:
    text = "valid, x\nreward 0, continues\n[bold]seen[/bold] \x1b[2J\x9b2J \udcff"
    done = sit("look", reply=lambda messages: text)
    assert "[bold]seen[/bold]" in done.output and "\x1b" not in done.output and "\x9b" not in done.output


def test_a_task_is_chosen_by_its_id(sit: Sit) -> None:
    done = sit("/next", "/next", options=["--task", "barn"])
    first, second = done.output.split("\ntask ")[1:]
    assert "barn" in first and "house" in second
    wrong = sit(options=["--task", "bran"])
    assert wrong.exit_code == 2 and "Did you mean 'barn'?" in wrong.output


def tool_world(messages: list[BaseMessage]) -> str:
    if '"answer"' in messages[-1].text:
        return "it is booked\nsuccess"
    return 'valid, it books\nreward 0, continues\n{"booked": true}'


def test_a_person_calls_tools(sit: Sit, tmp_path: Path) -> None:
    lines = ['bok {"at": 8}', "book at=8", 'book {"at": "8", "seats": 2}', "hang_up", "/answer", "/answer Booked."]
    done = sit(*lines, tasks=[TABLE], reply=tool_world, options=["--record"])
    assert done.exit_code == 0, done.output
    for said in (
        'book(at, seats?: {"type": "integer"}) Book a table.',
        "\nhang_up\n",
        "An action is NAME",
        "Did you mean 'book'?",
        "'at=8' is no JSON object; write book {",
        "/answer is no command here",
        "success: reward 1 in 3 actions",
    ):
        assert said in done.output, said
    assert [json.loads(step.action) for step in recorded(tmp_path)[0].steps] == [
        {"name": "book", "arguments": {"at": "8", "seats": 2}},
        {"name": "hang_up", "arguments": {}},
        {"answer": "Booked."},
    ]


@pytest.mark.parametrize("line", ["book [1]", "book {broken", "boo {}", '{"name": "book"}', "/quit now"])
def test_a_line_that_is_no_call_is_refused(line: str) -> None:
    with pytest.raises(ConfigurationError):
        typed_action(line, TABLE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give either a WORLD, or --replay-buffer"),
        (["--replay-buffer", "replay.db"], "--replay-buffer needs --experience-model"),
        ([".", "--replay-buffer", "replay.db", "--experience-model", "x"], "give either a WORLD, or --replay-buffer"),
        (["."], "'.' is no folder of an experiment: it has no settings.json"),
        ([".", "--experience-model", "x"], "leave --experience-model away"),
    ],
)
def test_what_is_missing_is_said(options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ReplayBuffer("replay.db").close()
    done = CliRunner().invoke(app, options, env={"COLUMNS": "200"})
    assert done.exit_code == 2 and said in done.output.replace("\n", " ")


def test_a_buffer_without_a_task_says_so(sit: Sit) -> None:
    done = sit(tasks=[])
    assert done.exit_code == 2 and "there is no task to play" in done.output


def test_ctrl_c_ends_politely_and_records(sit: Sit, tmp_path: Path) -> None:
    def reply(messages: list[BaseMessage]) -> str:  # in the dream's own thread
        if messages[-1].text.endswith("wait"):
            interrupt_main()
            Event().wait(1)
        return door(messages)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        done = sit("open door", "wait", options=["--record"], reply=reply)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 130 and "stopped" in done.output
    assert [step.action for step in recorded(tmp_path)[0].steps] == ["open door"]


@pytest.mark.slow
def test_a_finished_run_in_the_dream(finished_run: Path) -> None:
    """As a user types it, in a process of its own: an action that the check refuses, and one that the world answers."""
    with ReplayBuffer(finished_run / "replay.db") as buffer:
        task = [each for each in buffer.tasks(split="test", origin="real") if each.metadata["fold"] == "train"][0]
        before = buffer.count("trajectories")
    code = "import typer; from dreamgym_lg.cli.play import play; typer.run(play)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(finished_run)],
        text=True,
        capture_output=True,
        timeout=90,
        input="zzqx unheard-of\nread instructions book\n",
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert task.id in done.stdout and str(task.observation)[:60] in done.stdout
    assert "invalid, reward" in done.stdout and "You act in the dream " in done.stdout
    with ReplayBuffer(finished_run / "replay.db") as buffer:
        assert buffer.count("trajectories") == before
