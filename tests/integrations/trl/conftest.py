"""pytest's importlib mode puts no folder on the path, so `import grpo_parts` needs this; and what these tests share."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import create_tokenizer
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.trl.sft import save_model
from dreamgym_lg.token_recorder import TokenRecorder
from dreamgym_lg.types import Trajectory

sys.path.insert(0, str(Path(__file__).parent))
from grpo_parts import QUESTION, WORDS, model_of, trajectory  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tokenizer([*WORDS * 3, "say a colour", "a longer observation of the kitchen"], vocab_size=320)


@pytest.fixture(name="moved")
def _moved(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Any:
    """A policy that has moved away from its reference, so that the KL term has a gradient."""
    save_model(model_of(tokenizer), tokenizer, tmp_path / "base")
    model = LocalChatModel.from_path(tmp_path / "base").model
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


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
