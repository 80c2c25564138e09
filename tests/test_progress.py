"""Progress: in a notebook, played by a real Jupyter kernel, and in a file."""

import nbclient
import nbformat
import pytest

from dreamgym_lg.progress import show_progress

CELL = """
from dreamgym_lg.progress import show_progress

for done in range(3):
    show_progress("base policy (loss 3.0)", done, 2)
show_progress("train: rollout", 5, 40)
print("said")
"""


@pytest.mark.slow
def test_a_cell_of_a_notebook_shows_each_stage_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # else jupyter_core warns
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL), nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=60).execute()
    for cell in notebook.cells:
        printed = "".join(output.text for output in cell.outputs)
        lines = [line.strip() for line in printed.replace("\r", "\n").splitlines()]
        assert lines == [*(f"base policy (loss 3.0): {done}/2" for done in range(3)), "train: rollout: 5/40", "said"]


def test_a_file_gets_a_line_for_each_tenth_of_a_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dreamgym_lg.progress._reached", {})
    monkeypatch.setattr("dreamgym_lg.progress._starts", {})
    for done in range(101):
        show_progress(f"base policy (loss {done})", done, 100)
    show_progress("train: rollout", 1, 40)
    show_progress("train: update", 2, 40)
    show_progress("collect", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        *(f"base policy (loss {done}): {done}/100" for done in range(0, 101, 10)),
        "train: rollout: 1/40",
        "collect: 0/0",
    ]


def test_the_time_left_is_of_what_this_process_has_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dreamgym_lg.progress._starts", {})
    monkeypatch.setattr("dreamgym_lg.progress._reached", {})
    clock = [40.0]
    monkeypatch.setattr("dreamgym_lg.progress.time.monotonic", lambda: clock[0])
    show_progress("base policy", 0, 40)  # before the weights are loaded
    times = {20: 100.0, 24: 105.0, 25: 112.0, 26: 120.0, 28: 160.0, 40: 220.0}
    for done, clock[0] in times.items():  # it goes on from a checkpoint
        show_progress("base policy (loss 1.0)", done, 40)
    shown = [line.partition("): ")[2] for line in capsys.readouterr().err.splitlines()]
    assert shown[-5:] == ["20/40", "24/40", "25/40, 0.6 min left", "28/40, 1.5 min left", "40/40"]
