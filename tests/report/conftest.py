"""Pictures are rasterised only where a test looks at them (`drawn`): that takes a fifth of a second.

pytest's importlib mode puts no folder on the path, so `import report_parts` needs this.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def drawn():
    """The test looks at the picture."""


@pytest.fixture(autouse=True)
def _undrawn(request, monkeypatch):
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **options: file.write(b"a picture"))
