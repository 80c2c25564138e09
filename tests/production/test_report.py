"""The log of a canary: its blocks of outcomes, and what the report says of them; no words of users, models and tools in it."""

import random
from pathlib import Path
from typing import Any

import pytest
from desk import Desk, ask, careful, in_thread, policy, rash
from typer.testing import CliRunner

from dreamgym_lg.cli.app import app
from dreamgym_lg.production import CanaryLog, Pair, canary, shadow, wait_for_shadows
from dreamgym_lg.production.report import create_report, report_table, write_page

SECRET = "hunter2-7f3a"


def begun(path: Path, share: float, threads: int) -> tuple[CanaryLog, dict[str, str]]:
    log = CanaryLog(path)
    log.begin("v2", policy_version="p", share=share, alpha=0.001)
    return log, {str(number): log.choose("v2", str(number), switched_off=False) for number in range(threads)}


@pytest.mark.parametrize(("share", "block"), [(0.05, (1, 9)), (0.2, (1, 4)), (0.5, (1, 1)), (0.8, (4, 1)), (1.0, (1, 1))])
def test_outcomes_are_tested_in_whole_blocks(share: float, block: tuple[int, int], tmp_path: Path) -> None:
    log, sides = begun(tmp_path / "log.db", share, 300)
    rng = random.Random(1)
    for thread in rng.sample(list(sides), len(sides)):
        log.record_outcome(thread, rng.random() < 0.5)
    state = log.state()
    blocks = state.tested["policy"][1] // block[0]
    assert {side: outcomes for side, (_, outcomes) in state.tested.items()} == {
        "policy": blocks * block[0],
        "production": blocks * block[1],
    }
    fewest = min(list(sides.values()).count(side) // size for side, size in zip(("policy", "production"), block, strict=True))
    assert 0.7 * fewest <= blocks <= fewest


def test_of_a_side_that_is_far_ahead_the_oldest_outcomes_are_left_out(tmp_path: Path) -> None:
    """Production succeeded in old times, and fails now as the policy does: the policy is not to blame."""
    log, sides = begun(tmp_path / "log.db", 0.5, 400)
    served = {side: [thread for thread, by in sides.items() if by == side] for side in ("policy", "production")}
    for number, thread in enumerate(served["production"]):
        log.record_outcome(thread, number < len(served["production"]) - 20)
    for thread in served["policy"]:
        log.record_outcome(thread, False)
    assert log.state().tested == {"policy": (0, 20), "production": (0, 20)}


def test_the_first_outcome_of_a_thread_counts(tmp_path: Path) -> None:
    log, sides = begun(tmp_path / "log.db", 1.0, 1)
    assert log.record_outcome("0", False) and not log.record_outcome("0", True)
    success = log.state().served["policy"].success
    assert sides == {"0": "policy"} and success is not None and success.value == 0


def test_report_table_and_page_tell_the_same(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    graph = canary(
        desk.graph, policy(rash), log=tmp_path / "log.db", name="<v2>", share=0.5, shadow=1.0,
        verify=lambda _, state: "cancelled" in state["messages"][-1].text,
    )  # fmt: skip
    for number in range(30):
        graph.invoke(ask("A3"), in_thread(number))
        assert wait_for_shadows(graph, 30)
    log = CanaryLog(tmp_path / "log.db")
    report, state = create_report(log), log.state()
    assert state.ended and sum(report.statuses.values()) == 30
    done = CliRunner().invoke(app, ["canary", str(tmp_path / "log.db"), "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    page, words = (tmp_path / "page.html").read_text(), " ".join(done.output.split())
    assert "<h1>Canary &lt;v2&gt;</h1>" in page and "ended: the policy is proven worse" in page and "<v2>: ended" in words
    production = state.served["production"].success
    assert production is not None and production.value == 1 and str(production) in page
    writes = report.agreement["the same writing calls, with the same arguments"]
    assert writes.successes < writes.episodes and str(writes) in page
    assert dict(report.differences)["only policy called cancel_order so"] and "only policy called cancel_order so" in page
    assert report_table(report).row_count == 2 + len(
        [*report.agreement, *report.outcomes, *report.statuses, *report.differences]
    )


def test_a_shadow_shows_agreement_and_no_sides(tmp_path: Path) -> None:
    log = CanaryLog(tmp_path / "log.db")
    log.begin("v2", policy_version="p", share=0, alpha=0.05)
    for number in range(4):
        log.add_pair("v2", Pair(str(number), "production", "compared", True, number > 0, False, True, number > 1))
    log.add_pair("v2", Pair("5", "production", "unanswered", False, None), dropped=7)
    report = create_report(log)
    assert report.sides == [] and report.state.verdict == "shadow: production serves every thread"
    counts = {words: (rate.successes, rate.episodes) for words, rate in {**report.agreement, **report.outcomes}.items()}
    assert list(counts.values()) == [(3, 4), (4, 5), (0, 4), (4, 4), (2, 4)]
    assert report.statuses["not simulated: too many waited"] == 7
    write_page(report, tmp_path / "page.html")
    assert "<h2>Served</h2>" not in (tmp_path / "page.html").read_text()


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


def test_no_secret_is_in_log_page_or_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted in the environment, the system prompt, the request, a tool's argument and answer, and an error."""
    monkeypatch.setenv("SUPPORT_KEY", SECRET)
    desk = Desk(tmp_path, system_prompt=f"The key is {SECRET}.")

    def fails(messages: list[Any]) -> Any:
        raise ValueError(str(messages))

    seen = ""
    for number, reply in enumerate((careful, rash, fails)):
        options: dict[str, Any] = {"log": tmp_path / "log.db", "share": 1.0}
        for kind, graph in (
            ("shadow", shadow(desk.graph, policy(reply), name=f"{number} shadow", **options)),
            ("canary", canary(desk.graph, policy(reply), name=f"{number} canary", shadow=1.0, **options)),
        ):
            try:
                seen += str(graph.invoke({"messages": [("human", f"Cancel {SECRET}")]}, in_thread(kind)))
            except ValueError as error:
                assert kind == "canary" and SECRET in str(error)
            assert wait_for_shadows(graph, 30)
    assert SECRET in seen
    log = CanaryLog(tmp_path / "log.db")
    for name in log.names():
        write_page(create_report(log, name), tmp_path / f"{name}.html")
    output = CliRunner().invoke(app, ["canary", str(tmp_path / "log.db")]).output
    kept = b"".join(file.read_bytes() for file in [*tmp_path.glob("log.db*"), *tmp_path.glob("*.html")])
    assert b"cancel_order" in kept and SECRET.encode() not in kept
    assert "cancel_order" in output and SECRET not in output and SECRET not in caplog.text
