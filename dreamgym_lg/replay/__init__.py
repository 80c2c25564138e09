"""The replay buffer: tasks, trajectories and metrics in one SQLite file, and the retrieval of similar steps."""

from dreamgym_lg.replay.buffer import ReplayBuffer

__all__ = ["ReplayBuffer"]
