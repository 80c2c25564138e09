"""Experience models by the name of a chat model."""

from typing import Any

import pytest

from dreamgym_lg.errors import ConfigurationError
from dreamgym_lg.experience.chat_models import to_experience_model
from dreamgym_lg.replay.buffer import ReplayBuffer


def test_an_experience_model_by_name_is_grounded_in_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("langchain_openai")
    monkeypatch.setenv("OPENAI_API_KEY", "no-real-key")

    def facts(task: Any, history: Any, seed: int) -> list[str]:
        return [""] * (len(history) + 1)

    with ReplayBuffer(":memory:") as buffer:
        experience = to_experience_model("openai:gpt-5.4-mini", buffer, hidden_facts=facts)
        assert (experience.k, experience.replay_buffer, experience.hidden_facts) == (3, buffer, facts)
        assert experience.version == "gpt-5.4-mini/experience-6+hidden_facts"
        assert to_experience_model(experience, buffer) is experience
        with pytest.raises(ConfigurationError, match="experience_model=3 is no chat model"):
            to_experience_model(3, buffer)  # type: ignore[arg-type]
