"""Progress in a notebook, played by a real Jupyter kernel."""

import re

import nbclient
import nbformat
import pytest

CELL = """
from dreamgym_lg.progress import show_progress

for done in range(3):
    show_progress("base policy (loss 3.0)", done, 2)
show_progress("train: rollout", 5, 40)
print("said")
"""


@pytest.mark.slow
def test_a_cell_of_a_notebook_shows_a_bar_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # else jupyter_core warns
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL), nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=60).execute()
    for cell in notebook.cells:
        shown, said = cell.outputs
        assert (shown.output_type, said.text) == ("display_data", "said\n"), "one output, brought up to date"
        text = " ".join(re.sub(r"\x1b\[[\d;]*m", "", shown.data["text/plain"]).split())
        assert re.search(r"base policy \(loss 3.0\) ━+ 2/2", text) and re.search(r"train: rollout [━╸╺]+ 5/40", text)
        assert "train: rollout" in shown.data["text/html"]
