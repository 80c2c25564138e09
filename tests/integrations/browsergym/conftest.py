"""One real Chromium for all tests of this folder; without one they are skipped.

pytest's importlib mode puts no folder on the path, so `import browser_parts` needs this.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dreamgym_lg.integrations.browsergym.browsers import Browsers

sys.path.insert(0, str(Path(__file__).parent))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browsers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def browsers() -> Iterator["Browsers"]:
    """One browser at a time. A test that needs another process of its own closes this one first."""
    from browser_parts import miniwob

    from dreamgym_lg.errors import MissingDependency
    from dreamgym_lg.integrations.browsergym.browsers import Browsers
    from dreamgym_lg.integrations.browsergym.environment import BrowserGym

    found = Browsers(1)
    environment = BrowserGym(found)
    try:
        environment.reset(miniwob("click-test"))
    except MissingDependency as missing:
        pytest.skip(str(missing))
    finally:
        environment.close()
    yield found
    found.close()


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """MiniWoB++'s pages in a folder of their own, for a test to change some."""
    html = Path(str(find_spec("miniwob").origin)).parent / "html"  # type: ignore[union-attr]
    for folder in html.iterdir():
        (tmp_path / folder.name).mkdir()
        for file in folder.iterdir():
            (tmp_path / folder.name / file.name).symlink_to(file)
    return tmp_path / "miniwob"
