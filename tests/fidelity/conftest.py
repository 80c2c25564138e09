"""The dream of a text world whose model is believed: its own rewards count."""

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel

from dreamgym_lg.dream import Answer, Dream, Episode, Model, Verdict


class OwnRewards:
    """Judges a text agent's step by the reward that the model itself predicts."""

    name = "own rewards"

    def judge(self, episode: Episode, answer: Answer | None) -> Verdict | None:
        return answer.verdict if answer is not None else None


@pytest.fixture
def text_dream() -> Any:
    """(chat model, options of `Model`) -> a dream of a text world."""

    def create(model: BaseChatModel, **options: Any) -> Dream:
        return Dream([Model(model, **options)], judges=[OwnRewards()])

    return create
