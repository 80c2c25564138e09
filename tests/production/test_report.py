"""The log of a canary, and what `dreamgym canary` says of it; no words of users, models and tools in it."""

from pathlib import Path
from typing import Any

import pytest
from desk import Desk, ask, careful, in_thread, policy, rash
from rich.console import Console
from typer.testing import CliRunner

from dreamgym_lg.cli.app import app
from dreamgym_lg.cli.canary import canary_table
from dreamgym_lg.production import CanaryLog, canary

SECRET = "hunter2-7f3a"


def table(log: CanaryLog, name: str) -> list[list[str]]:
    console = Console(width=200, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(canary_table(log, name))
    return [[cell.strip() for cell in line.strip("│ ").split("│")] for line in capture.get().splitlines()]


def test_the_first_outcome_of_a_thread_counts_and_one_without_is_left_out(tmp_path: Path) -> None:
    log = CanaryLog(tmp_path / "log.db")
    log.begin("v2", policy_version="p", share=1.0, alpha=0.001)
    assert {log.choose("v2", thread) for thread in "012"} == {"policy"}
    assert log.record_outcome("0", False) and not log.record_outcome("0", True)
    served = log.state().served["policy"]
    assert served.success is not None and served.success.value == 0 and (served.threads, served.waiting) == (3, 2)
    assert log.record_outcome("1", None) and not log.record_outcome("1", True)
    served = log.state().served["policy"]
    assert (served.threads, served.waiting) == (3, 1) and served.success is not None and served.success.episodes == 1


def test_the_table_of_a_canary(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    graph = canary(
        desk.graph, policy(rash), log=tmp_path / "log.db", name="<v2>", share=0.5,
        verify=lambda _, state: "cancelled" in state["messages"][-1].text,
    )  # fmt: skip
    for number in range(30):
        graph.invoke(ask("A3"), in_thread(number))
    log = CanaryLog(tmp_path / "log.db")
    served, rows = log.state().served["production"], table(log, "<v2>")
    assert log.state().ended and served.success is not None and served.success.value == 1
    title = " ".join(row[0] for row in rows[:3])
    assert title.startswith("<v2>: ended: the policy is proven worse than production (alpha 0.05): policy 0 of ")
    expected = ["production", f"success {served.success}, 0 without", f"{served.threads} threads, {served.runs} runs, 0 errors"]
    assert expected in rows
    done = CliRunner().invoke(app, ["canary", str(tmp_path / "log.db")])
    assert done.exit_code == 0 and "<v2>: ended" in " ".join(done.output.split())


def test_the_command_stops_a_canary_and_names_what_is_wrong(tmp_path: Path) -> None:
    log, run = CanaryLog(tmp_path / "log.db"), CliRunner().invoke
    for name in ("v1", "v2"):
        log.begin(name, policy_version="p", share=0.1, alpha=0.05)
    assert run(app, ["canary", str(tmp_path / "log.db"), "--name", "v2", "--stop"]).exit_code == 0
    assert log.state("v2").ended and not log.state("v1").ended
    for arguments, match in ((["log.db", "--stop"], "holds 2 canaries (v1, v2): give name="), (["no.db"], "does not exist")):
        done = run(app, ["canary", str(tmp_path / arguments[0]), *arguments[1:]])
        assert done.exit_code == 2 and match in done.output
    assert not (tmp_path / "no.db").exists()


def test_no_secret_is_in_log_table_or_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted in the environment, the system prompt, the request, a tool's argument and answer, and an error."""
    monkeypatch.setenv("SUPPORT_KEY", SECRET)
    desk = Desk(tmp_path, system_prompt=f"The key is {SECRET}.")

    def fails(messages: list[Any]) -> Any:
        raise ValueError(str(messages))

    seen = ""
    for number, reply in enumerate((careful, rash, fails)):
        served = canary(desk.graph, policy(reply), name=f"{number} canary", log=tmp_path / "log.db", share=1.0)
        try:
            seen += str(served.invoke({"messages": [("human", f"Cancel {SECRET}")]}, in_thread("canary")))
        except ValueError as error:
            assert SECRET in str(error)
    assert SECRET in seen
    output = CliRunner().invoke(app, ["canary", str(tmp_path / "log.db")]).output
    kept = b"".join(file.read_bytes() for file in tmp_path.glob("log.db*"))
    assert b"2 canary" in kept and SECRET.encode() not in kept
    assert "2 canary" in output and SECRET not in output and SECRET not in caplog.text
