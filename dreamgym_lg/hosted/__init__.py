"""Hosted chat models: by name, with a budget, answers kept on disk, and no key in what is written."""

from dreamgym_lg.hosted.hosted import Hosted, Usage

__all__ = ["Hosted", "Usage"]
