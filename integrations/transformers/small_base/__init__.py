"""The small pretrained model that small policies and experience models start from."""

from pathlib import Path

SMALL_BASE = Path(__file__).parent / "model"
"""The folder of weights, tokenizer, chat template and card; `LocalChatModel.from_path(SMALL_BASE)` loads it like any other."""
