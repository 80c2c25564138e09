"""Chat models by name: what is missing is said with the command that installs it; docs name one hosted model."""

import re
import sys
from pathlib import Path

import pytest

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.hosted import EXAMPLE_MODEL, load_chat_model

ROOT = Path(__file__).parents[2]
EXTRA = "pip install '.[openai]' in the clone"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        (EXAMPLE_MODEL, EXTRA),
        (EXAMPLE_MODEL.removeprefix("openai:"), EXTRA),
        ("anthropic:claude-sonnet-4-5", "pip install langchain langchain-anthropic"),
        ("google_genai:gemini-2.5-flash", "pip install langchain langchain-google-genai"),
    ],
)
@pytest.mark.parametrize("missing", ["langchain.chat_models", "the provider's"])
def test_the_command_that_installs_what_is_missing_is_in_the_error(
    monkeypatch: pytest.MonkeyPatch, name: str, command: str, missing: str
) -> None:
    package = command.split()[-1].replace("-", "_")
    module = missing if missing.startswith("langchain") else "langchain_openai" if command == EXTRA else package
    base = pytest.importorskip("langchain.chat_models.base")
    base._get_chat_model_creator.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency) as caught:
        load_chat_model(name)
    assert str(caught.value) == f"the model {name!r} needs another package; run: {command}"


def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'nobody:gpt' cannot be used"):
        load_chat_model("nobody:gpt")


def test_one_hosted_model_is_named_everywhere() -> None:
    texts = [ROOT / "README.md"]
    for folder in ("docs", "cookbook", "dreamgym_lg", "graphs", "integrations"):
        texts += [file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".ipynb", ".md")]
    names = {name for file in texts for name in re.findall(r"\bopenai:gpt[\w.-]*", file.read_text())}
    assert names == {EXAMPLE_MODEL}
