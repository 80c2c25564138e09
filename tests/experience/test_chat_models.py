"""Chat models by name: what is missing is said with the command that installs it."""

import sys
from typing import Any

import pytest

from dreamgym_lg.errors import ConfigurationError, MissingDependency
from dreamgym_lg.experience.chat_models import load_chat_model, to_experience_model
from dreamgym_lg.replay.buffer import ReplayBuffer

EXTRA = "pip install 'dreamgym-lg[openai]'"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("openai:gpt-5-mini", EXTRA),
        ("gpt-5-mini", EXTRA),
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


def test_an_experience_model_by_name_is_grounded_in_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("langchain_openai")
    monkeypatch.setenv("OPENAI_API_KEY", "no-real-key")

    def facts(task: Any, history: Any, seed: int) -> list[str]:
        return [""] * (len(history) + 1)

    with ReplayBuffer(":memory:") as buffer:
        experience = to_experience_model("openai:gpt-5-mini", buffer, hidden_facts=facts)
        assert (experience.k, experience.replay_buffer, experience.hidden_facts) == (3, buffer, facts)
        assert experience.version == "gpt-5-mini/experience-6+hidden_facts"
        assert to_experience_model(experience, buffer) is experience
        with pytest.raises(ConfigurationError, match="experience_model=3 is no chat model"):
            to_experience_model(3, buffer)  # type: ignore[arg-type]
