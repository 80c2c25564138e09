"""Worlds compiled from the logs of three desks whose authors had not read this library (`cookbook/desks`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dreamgym_lg import ReplayBuffer, load_traces
from dreamgym_lg.compiled.compile import compile_world
from dreamgym_lg.compiled.replaying import ToolReplay

DESKS = Path(__file__).parents[2] / "cookbook" / "desks"
pytestmark = pytest.mark.slow  # 150 episodes of a graph over a file


def compiled(desk: str, tools: list[str], folder: Path) -> dict[str, ToolReplay]:
    logs = folder / "logs.jsonl"
    command = [sys.executable, "write_logs.py", "--out", str(logs), "--episodes", "150", "--seed", "1"]
    subprocess.run(command, cwd=DESKS / desk, check=True)
    replay_buffer = ReplayBuffer(folder / "replay.db")
    replay_buffer.extend(load_traces(logs, environment=desk))
    report = compile_world(replay_buffer, folder / "world", writes=tools, on_progress=lambda *_: None)
    return {each.tool: each for each in report}


def test_the_clinics_writes_are_exact_on_traces_that_share_no_entity(tmp_path: Path) -> None:
    report = compiled("clinic", ["move_visit"], tmp_path)
    assert report["move_visit"].admitted and report["move_visit"].exact > 100
    assert report["move_visit"].refused * 9 <= report["move_visit"].exact, "at least 90 % of the calls"
    assert not any(each.wrong for each in report.values())


def test_the_librarys_three_writing_tools_are_exact(tmp_path: Path) -> None:
    writes = ["hand_over", "reserve", "serve"]
    report = compiled("library", writes, tmp_path)
    assert all(report[tool].admitted and not report[tool].refused for tool in writes)
    assert sum(report[tool].exact for tool in writes) > 100 and not any(each.wrong for each in report.values())


def test_a_permit_is_extended_by_months_where_its_record_was_looked_up(tmp_path: Path) -> None:
    """The parking office adds months to a date that only the permit's record tells."""
    report = compiled("parking", ["extend_permit"], tmp_path)
    assert report["extend_permit"].admitted and report["extend_permit"].exact > 50
    assert "later(permit_record_permit['until'], months=args['months'])" in (tmp_path / "world" / "world.py").read_text()
    assert not any(each.wrong for each in report.values())


def test_a_desks_own_check_judges_dreamed_steps_as_it_judged_the_real_ones(tmp_path: Path) -> None:
    """The glue of `cookbook/desks`, in a process where no other test imports a module of the same name."""
    program = """
import json, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from glue import Desk
from dreamgym_lg import load_traces
desk = Desk(sys.argv[2], Path(sys.argv[3]))
outcomes = []
for trajectory in load_traces(sys.argv[4], environment=desk.name):
    outcomes.append([desk.check_steps(trajectory.task, trajectory.steps), trajectory.reward])
print(json.dumps(outcomes))
"""
    for desk in ("clinic", "parking", "library"):
        logs = tmp_path / f"{desk}.jsonl"
        command = [sys.executable, "write_logs.py", "--out", str(logs), "--episodes", "60", "--seed", "3"]
        subprocess.run(command, cwd=DESKS / desk, check=True)
        arguments = [sys.executable, "-c", program, str(DESKS), desk, str(tmp_path / desk), str(logs)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
        outcomes = json.loads(done.stdout)
        assert len(outcomes) == 60 and {real for _, real in outcomes} == {0.0, 1.0}
        assert all(dreamed == real for dreamed, real in outcomes)


def test_what_is_right_in_an_imputed_state_is_what_the_library_says_of_its_own(tmp_path: Path) -> None:
    program = """
import sqlite3, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from glue import Desk
from library_states import right_case
desk = Desk("library", Path(sys.argv[2]))
connection = sqlite3.connect(desk.master)
loans = {row[0]: row for row in connection.execute("SELECT * FROM loans")}
readers = {number: card for number, _, card in connection.execute("SELECT * FROM readers")}
for case in desk.cases.values():
    known = {number: row for number, row in loans.items() if number in case["instruction"] or row[1] in case["instruction"]}
    right = right_case(desk, case, known, readers)
    assert right["fact"] == case["fact"] and sorted(right["writes"]) == sorted(case["writes"]), (right, case)
    changed = {number: (*row[:3], "lost") for number, row in known.items()}
    if case["field"] is None:
        assert all(write[1][1] == "lost" for write in right_case(desk, case, changed, readers)["writes"])
assert right_case(desk, next(case for case in desk.cases.values() if case["kind"] == "two_loans"), {}, readers) is None
print(len(desk.cases))
"""
    command = [sys.executable, "-c", program, str(DESKS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "810", done.stderr[-2000:]
