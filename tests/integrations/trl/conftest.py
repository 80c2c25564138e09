"""pytest's importlib mode puts no folder on the path, so `import grpo_parts` needs this; and what these tests share."""

import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dreamgym_lg.integrations.transformers.tiny_models import create_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from grpo_parts import WORDS  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tokenizer([*WORDS * 3, "say a colour", "a longer observation of the kitchen"], vocab_size=320)
