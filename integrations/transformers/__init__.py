"""Local Hugging Face models: `LocalChatModel` and the engine behind it."""

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel

__all__ = ["LocalChatModel"]
