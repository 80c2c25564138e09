"""Secrets are planted wherever an agent has them; then a whole run is searched for them: every file, log and page."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from typer.testing import CliRunner

pytest.importorskip("langchain_openai")
pytest.importorskip("matplotlib")
pytest.importorskip("starlette")
pytest.importorskip("trl")

from starlette.testclient import TestClient
from tiny_models import create_model, create_tokenizer

from dreamgym_lg import DreamGym, Model, ReplayBuffer, Task, load_traces
from dreamgym_lg.cli.app import app
from dreamgym_lg.errors import EpisodesMissing
from dreamgym_lg.experiment.evaluation import shown_episodes
from dreamgym_lg.hosted import Hosted
from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.redaction import environment_secrets, redact_environment
from dreamgym_lg.report.proof import write_report
from dreamgym_lg.report.server import create_app
from dreamgym_lg.report.views import link

_PLACES = ("openai", "langsmith", "hub", "rooms", "closure", "default", "model", "prompt")
SECRET = {place: f"{place}-{token_hex(12)}" for place in _PLACES}
"""Is to be found nowhere at all."""
SEEN = {place: f"{place}-{token_hex(12)}" for place in ("schema", "trace")}
"""What the experience model is shown: the replay buffer holds it, so do its pages and the reports, and nothing else."""
VARIABLES = {"openai": "OPENAI_API_KEY", "langsmith": "LANGSMITH_API_KEY", "hub": "HF_TOKEN", "rooms": "ROOMS_PASSWORD"}

AGENT = f'''
import os
import subprocess
import sys
from typing import Annotated, Any

from langchain.agents import create_agent
from langchain.agents.middleware import before_agent
from langchain_core.tools import InjectedToolArg, tool
from langchain_openai import ChatOpenAI


def create_booking(key: str) -> Any:
    @tool
    def book(city: str, of: str = "{SEEN["schema"]}", token: Annotated[str, InjectedToolArg] = "{SECRET["default"]}") -> str:
        """Book a room."""
        assert key and token
        if city == "Rome":
            raise ConnectionError(f"403 for https://rooms.example/{{city}}?key={{os.environ['ROOMS_PASSWORD']}}")
        return f"booked with {{os.environ['ROOMS_PASSWORD']}}"

    return book


@before_agent
def check(state: Any, runtime: Any) -> None:
    if "DREAMED" in state["messages"][-1].text:
        print("asked with", os.environ["ROOMS_PASSWORD"], file=sys.stderr)
        subprocess.run(["curl", f"https://user:{{os.environ['ROOMS_PASSWORD']}}@rooms.example/"])


graph = create_agent(
    ChatOpenAI(model="production", api_key="{SECRET["model"]}"),
    [create_booking("{SECRET["closure"]}")],
    system_prompt="You book rooms. {SECRET["prompt"]}",
    middleware=[check],
)
'''


def row(city: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "book", "arguments": json.dumps({"city": city})}}
    messages = [
        {"role": "user", "content": f"Book a room in {city}. {SEEN['trace']}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": f"booked {SEEN['trace']}"},
        {"role": "assistant", "content": "done"},
    ]
    return {"messages": messages, "reward": 1}


def hotel(messages: list[dict[str, Any]]) -> str:
    """The experience model: every booking is right, and every episode a success."""
    if "message" in json.loads(messages[-1]["content"]):
        return json.dumps({"reason": "as asked", "success": True})
    verdict = {"reasoning": "as asked", "valid": True, "reward": 0, "terminated": False, "success": False}
    return json.dumps({**verdict, "observation": "booked"})


def fault(number: int) -> str:
    return {1: "500", 2: "echo"}.get(number, "")


def tiny() -> LocalChatModel:
    tokenizer = create_tokenizer(["Book a room.", "You book rooms.", "<tool_call>"], vocab_size=320)
    model = create_model(tokenizer, hidden_size=32, layers=1, max_tokens=4096)
    return LocalChatModel(model=model, tokenizer=tokenizer, name_or_path="org/tiny", max_new_tokens=4)


def task(city: str, **options: Any) -> Task:
    return Task(id=f"held-out/{city}", instruction=f"Book a room in {city}.", environment="rooms", split="test", **options)


def files(*folders: Path) -> dict[str, bytes]:
    paths = (path for folder in folders for path in (folder.rglob("*") if folder.is_dir() else [folder]))
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


def pages(database: Path) -> Iterator[tuple[str, bytes]]:
    """Every page of `dreamgym ui`."""
    with ReplayBuffer(database) as buffer, TestClient(create_app(database), base_url="http://127.0.0.1") as client:
        episodes = list(buffer.trajectories())
        runs = {each.run for each in episodes}
        addresses = ["/", "/episodes", *(f"/episode?id={number}" for number in range(1, len(episodes) + 1))]
        addresses += [link("/run", run=run, iteration=0) for run in runs]
        addresses += [link("/group", run=each.run, iteration=each.iteration, task_id=each.task.id) for each in episodes]
        for address in dict.fromkeys(addresses):
            answer = client.get(address)
            assert answer.status_code == 200, address
            yield address, answer.content


@pytest.mark.slow
def test_no_secret_is_written_anywhere(
    serve: Any,
    chat_model: Any,
    scripted: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Clerk(scripted):  # type: ignore[misc]
        """Books first."""

        def _generate(self, messages: list[Any], *args: Any, **kwargs: Any) -> Any:
            result = super()._generate(messages, *args, **kwargs)
            if messages[-1].type == "human":
                call = {"name": "book", "args": {"city": messages[-1].text.split()[-1][:-1]}, "id": "1"}
                result.generations[0].message = AIMessage("", tool_calls=[call])
            return result

    caplog.set_level(logging.DEBUG)
    server = serve(hotel, fault=fault)
    for name, variable in VARIABLES.items():
        monkeypatch.setenv(variable, SECRET[name])
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    (tmp_path / "my_app.py").write_text(AGENT)
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(row(city)) + "\n" for city in ("Bern", "Kyiv")))
    out, database, exported = tmp_path / "run", tmp_path / "run" / "replay.db", tmp_path / "exported"
    out.mkdir()

    buffer = ReplayBuffer(database)
    buffer.extend(load_traces(tmp_path / "traces.jsonl"))
    chat = chat_model(server, api_key=SECRET["openai"], max_retries=2)
    gym = DreamGym(
        f"{tmp_path / 'my_app.py'}:graph",
        replay_buffer=buffer,
        experience_model=Model(chat, replay_buffer=buffer, hosted=Hosted(out / "hosted.db")),
        tasks=[*buffer.tasks(split="train"), task("Oslo")],
        verify_real=lambda task, state: float("booked" in state["messages"][-1].text),
        out=out,
    )
    gym.train(tiny(), 1, num_tasks=2, num_generations=2, max_false_success=None, stop_after_uniform=0, beta=0.0)
    clerk = Clerk(reply=lambda messages: "It is booked.")
    assert gym.evaluate(clerk)[0].episodes == 1
    assert gym.evaluate(clerk, real=True)[0].successes == 1, "the real tool told its key"
    for real, city, cause in ((True, "Rome", "ConnectionError: 403"), (False, "Oslo (DREAMED)", "curl")):
        with pytest.raises(EpisodesMissing, match=rf"(?s){cause}.*\[key\]"):
            gym.evaluate(clerk, real=real, tasks=[task(city)])
    result = gym.prove()
    write_report(result, buffer.metrics(gym.experiment.run_name("train")), shown_episodes(gym.experiment), out)
    gym.export(exported)
    for command in (
        ["doctor", f"{tmp_path / 'my_app.py'}:graph"],
        ["fidelity", "--replay-buffer", str(database), "--experience-model", "openai:door", "--limit", "2"],
    ):
        (out / f"{command[0]}.txt").write_text(CliRunner().invoke(app, command).output)

    told = {"log": caplog.text.encode(), "terminal": "".join(capfd.readouterr()).encode()}
    written, shown = files(out), dict(pages(database))
    everything = {**written, **files(exported), **shown, **told}
    assert "worker: asked with" in caplog.text
    for name, secret in SECRET.items():
        assert not [where for where, text in everything.items() if secret.encode() in text], name
    own = {str(path) for path in out.iterdir() if path.name.startswith(("replay.db", "report.html", "fidelity.html"))}
    for name, text in SEEN.items():
        found = {where for where, content in everything.items() if text.encode() in content}
        assert {str(database), f"{database}-wal"} & found, f"{name} is where it has to be: the search finds what is there"
        assert found <= own | set(shown), name


def test_secrets_of_the_environment_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"OPENAI_API_KEY": "sk-123456", "PGPASSWORD": "correct horse", "AWS_SECRET_ACCESS_KEY": "wJalrXUtn"}
    others = {"HOME_TOWN": "Geneva on the lake", "SHORT_TOKEN": "EMPTY", "KEYBOARD": "de-latin1"}
    for name, value in (named | others).items():
        monkeypatch.setenv(name, value)
    assert set(named.values()) <= environment_secrets() and not set(others.values()) & environment_secrets()
    assert redact_environment("with sk-123456, in Geneva on the lake") == "with [key], in Geneva on the lake"
