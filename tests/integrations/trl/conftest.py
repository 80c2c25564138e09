"""pytest's importlib mode puts no folder on the path, so `import grpo_parts` needs this; and what these tests share."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.tiny_models import create_tokenizer
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Trajectory

sys.path.insert(0, str(Path(__file__).parent))
from grpo_parts import QUESTION, WORDS, trajectory  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tokenizer([*WORDS * 3, "say a colour", "a longer observation of the kitchen"], vocab_size=320)


@pytest.fixture
def play() -> Callable[..., list[list[Trajectory]]]:
    """One group of eight replies of a policy, every other one rewarded."""

    def replies(policy: LocalChatModel, **bound: float) -> list[list[Trajectory]]:
        episodes = []
        for index in range(8):
            with TokenRecorder(seed=index) as recorder:
                policy.invoke([(QUESTION["role"], QUESTION["content"])], **bound)
            episodes.append(trajectory(float(index % 2), *recorder.segments(), index=index))
        return [episodes]

    return replies
