"""Hosted chat models: by name, within a budget, their answers kept on disk."""

from dreamgym_lg.hosted.hosted import Hosted, Usage

__all__ = ["Hosted", "Usage"]
