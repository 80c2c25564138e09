"""The page, the figures file and the command, on a scripted dream and on a buffer's real file."""

import asyncio
import json
import re
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest

pytest.importorskip("jinja2")

import typer
from typer.testing import CliRunner

import dreamgym_lg.cli.fidelity as command
from dreamgym_lg.cli import experiment
from dreamgym_lg.dream import Model
from dreamgym_lg.fidelity import measure, write_fidelity
from dreamgym_lg.replay.buffer import ReplayBuffer
from dreamgym_lg.statistics import wilson
from dreamgym_lg.types import Step, Task, Trajectory

app = typer.Typer()
app.command()(command.fidelity)


def episode(name: str, **fields: Any) -> Trajectory:
    """A real episode of the world that conftest's `door_world` dreams."""
    task = Task(id=name, instruction="leave <b>now</b>", environment="house", observation="A closed door.")
    steps = [
        Step(observation="A closed door.", action="dance", next_observation="What?", valid=False),
        Step(observation="What?", action="open door", next_observation="The door is open.", reward=0.5),
        Step(
            observation="The door is open.", action="go north", next_observation="You are outside.", reward=0.5, terminated=True
        ),
    ]
    return Trajectory(task=task, steps=steps, success=True, **fields)


def never_done(door_world: Any) -> Any:
    """A dream that is right in everything but never says that the task is completed."""
    return lambda messages: door_world(messages).replace(", success", ", continues")


def text_of(html: Path) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.read_text()))


def test_a_dream_that_never_completes_the_task_is_found_out_at_first_sight(
    scripted: Any, text_dream: Any, door_world: Any, tmp_path: Path
) -> None:
    dream = text_dream(scripted(reply=never_done(door_world)))
    real = [episode(f"t{n}", source="real", run="validate/real", iteration=30) for n in range(12)]
    html, figures = write_fidelity(measure(dream, real), tmp_path / "out")
    said, read = text_of(html), json.loads(figures.read_text())
    assert "never says that the task is completed: it recognised 0 of 12 steps" in said
    assert read["conclusions"][0]["level"] == "bad" and "never says" in read["conclusions"][0]["sentence"]
    (group,) = read["groups"]
    one = group["one_step"]
    assert said.count("36 steps of 12 episodes") == 3 and one["normalised"]["episodes"] == 12
    assert one["success_recalled"]["n"] == 12 and one["success_recalled"]["successes"] == 0
    assert one["normalised"]["value"] == 1 and one["invalid_recall"]["value"] == 1  # all else is right
    assert one["success_false"] is None  # no success was dreamed: no share of them
    assert "<b>now</b>" not in html.read_text() and "<script" not in html.read_text()


def test_a_faultless_dream_is_called_good_and_nothing_else_but_unretrieved(
    scripted: Any, text_dream: Any, door_world: Any
) -> None:
    found = measure(text_dream(scripted(reply=door_world)), [episode(f"t{n}", source="real") for n in range(12)])
    assert [each.level for each in found.conclusions if each.level != "good"] == ["watch"]
    assert "No real transition is retrieved" in found.conclusions[0].sentence and len(found.conclusions) > 3


def test_without_a_trajectory_the_dream_is_ungrounded_and_no_number_is_made_up(
    scripted: Any, text_dream: Any, tmp_path: Path
) -> None:
    buffer = ReplayBuffer(":memory:")
    buffer.add_tasks([Task(id="t", instruction="leave", environment="house", split="test")])
    found = measure(text_dream(scripted(reply=str), replay_buffer=buffer), [])
    html, figures = write_fidelity(found, tmp_path)
    said = text_of(html)
    assert not found.grounded and "This dream is ungrounded" in said and "0.00" not in said and "nan" not in said.casefold()
    read = json.loads(figures.read_text())
    assert read["grounded"] is False and read["groups"] == []
    assert "One step" not in said


def test_failed_trajectories_are_left_out_and_counted(scripted: Any, text_dream: Any, door_world: Any) -> None:
    broken = [episode("t1", error="java died"), Trajectory(task=episode("t2").task)]
    found = measure(text_dream(scripted(reply=door_world)), [episode("t0"), *broken])
    assert found.left_out == 2 and found.groups[0].of == 1


def test_traces_without_a_first_observation_begin_with_their_first_step(
    scripted: Any, text_dream: Any, door_world: Any
) -> None:
    bare = Task(id="t", instruction="leave", environment="house")
    model = scripted(reply=door_world)
    measure(text_dream(model), [Trajectory(task=bare, steps=episode("t").steps)])
    assert "A closed door." in "".join(message.text for message in model.asked[0])


def test_the_command_on_anybodys_buffer(
    scripted: Any, text_dream: Any, door_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "replay.db"
    with ReplayBuffer(file) as buffer:
        buffer.extend([episode("t0"), *(episode(f"t{n}", source="real", run="eval/real") for n in range(1, 4))])
    named: list[str] = []

    def load_experience_model(model: str, replay_buffer: ReplayBuffer) -> Model:
        named.append(model)
        return Model(scripted(reply=door_world), replay_buffer=replay_buffer, demonstrations=1)

    monkeypatch.setattr(experiment, "load_experience_model", load_experience_model)
    options = ["--replay-buffer", str(file), "--experience-model", "test:door", "--limit", "2"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert named == ["test:door"] and "predicted rewards were right" in done.output
    read = json.loads((tmp_path / "fidelity.json").read_text())
    groups = {group["name"]: group for group in read["groups"]}
    assert groups["the policy's own actions"]["episodes"] == 2 and groups["the policy's own actions"]["of"] == 3
    low, high = wilson(1, 1)  # one episode: its three steps count as one
    assert groups["offline data"]["one_step"]["normalised"] == pytest.approx(
        {"successes": 3, "n": 3, "episodes": 1, "value": 1.0, "low": low, "high": high}
    )


def test_what_the_page_needs_is_checked_before_any_call_is_paid(
    scripted: Any, door_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        buffer.add(episode("t0"))
    server = scripted(reply=door_world)
    monkeypatch.setattr(experiment, "load_experience_model", lambda name, buffer: Model(server, replay_buffer=buffer))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = CliRunner().invoke(app, ["--replay-buffer", str(tmp_path / "replay.db"), "--experience-model", "test:door"])
    assert done.exit_code == 2 and "jinja2 is not installed" in done.output and server.asked == []


def test_a_call_that_fails_loses_no_answer(
    scripted: Any, door_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third call fails while two are under way. The same command then asks for the rest only."""
    with ReplayBuffer(tmp_path / "replay.db") as buffer:
        buffer.extend(episode(f"t{n}", source="real", run="eval/real") for n in range(4))
    ending, finish = Event(), command.finish_prompts
    monkeypatch.setattr(command, "finish_prompts", lambda: (ending.set(), finish()))

    class Server(scripted):  # type: ignore[misc]
        @property
        def lc_secrets(self) -> dict[str, str]:
            return {"key": "KEY"}

        async def _agenerate(self, messages: Any, *_: Any, **__: Any) -> Any:
            answer = self._generate(messages)
            if len(self.asked) == 3:
                raise ConnectionError("the server went away")
            await asyncio.to_thread(ending.wait, 20)
            return answer

    server = Server(reply=door_world)
    monkeypatch.setattr(
        experiment, "load_experience_model", lambda name, buffer: Model(server, replay_buffer=buffer, prompt_format="lines")
    )
    options = ["--replay-buffer", str(tmp_path / "replay.db"), "--experience-model", "test:door"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2 and "the server went away" in done.output, done.output
    first, second, _, *more = map(str, server.asked)
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    again = [*map(str, server.asked)][3 + len(more) :]
    assert again and not {first, second, *more} & {*again}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give either a WORLD, or --replay-buffer"),
        (["--replay-buffer", "replay.db"], "--replay-buffer needs --experience-model"),
        (["."], "'.' is no folder of an experiment: it has no settings.json"),
        (["peckingoder"], "Did you mean 'peckingorder'?"),
        ([".", "--experience-model", "test:door"], "leave --experience-model away"),
    ],
)
def test_the_command_says_what_is_missing(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ReplayBuffer("replay.db").close()
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2 and said in done.output


@pytest.mark.slow
def test_the_command_on_a_finished_run(finished_run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(finished_run), "--limit", "2", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    read = json.loads((tmp_path / "fidelity.json").read_text())
    assert {"offline data", "the policy's own actions"} <= {group["name"] for group in read["groups"]}
    judged = read["judgement"]["false_success"]
    assert judged is not None and 0 < judged["n"] <= 4, "two recorded failures, two of the policy's own: --limit holds"
    assert "Offline data:" in text_of(tmp_path / "fidelity.html")
