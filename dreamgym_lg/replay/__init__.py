"""The replay buffer in one SQLite file, and retrieval of similar steps."""

from dreamgym_lg.replay.buffer import ReplayBuffer

__all__ = ["ReplayBuffer"]
