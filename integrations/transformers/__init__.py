"""Local Hugging Face models: `LocalChatModel` and the engines behind it."""

from dreamgym_lg.errors import MissingDependency

try:
    import psutil  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingDependency.extra("transformers", "train") from error

from dreamgym_lg.integrations.transformers.chat_model import LocalChatModel
from dreamgym_lg.integrations.transformers.engine import LocalEngine

__all__ = ["LocalChatModel", "LocalEngine"]
