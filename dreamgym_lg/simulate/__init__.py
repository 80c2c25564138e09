"""Unmodified agents in the dream: the policy answers their models, an environment their tools."""

from dreamgym_lg.simulate.agent import SimulatedAgent, with_policy
from dreamgym_lg.simulate.allow import Allow
from dreamgym_lg.simulate.context import Blocked, RealAccessBlocked
from dreamgym_lg.simulate.doctor import Examination, Part, examine
from dreamgym_lg.simulate.episode import Call, EpisodeOptions, Route
from dreamgym_lg.simulate.simulated import SimulatedEpisode, simulated

__all__ = [
    "Allow",
    "Blocked",
    "Call",
    "EpisodeOptions",
    "Examination",
    "Part",
    "RealAccessBlocked",
    "Route",
    "SimulatedAgent",
    "SimulatedEpisode",
    "examine",
    "simulated",
    "with_policy",
]
