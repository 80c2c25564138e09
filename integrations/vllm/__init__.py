"""Replies of a local policy from vLLM servers: `ServedEngine`."""

from dreamgym_lg.errors import MissingDependency

try:
    import aiohttp  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingDependency.extra("aiohttp", "train") from error

from dreamgym_lg.integrations.vllm.engine import ServedEngine

__all__ = ["ServedEngine"]
