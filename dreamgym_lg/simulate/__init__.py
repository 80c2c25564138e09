"""Unmodified LangGraph agents in the dream: their models answered by the policy, their tools by an environment."""

from dreamgym_lg.simulate.agent import EpisodeOptions, SimulatedAgent, simulated, with_policy
from dreamgym_lg.simulate.context import Call
from dreamgym_lg.simulate.doctor import Examination, Part, examine
from dreamgym_lg.simulate.episode import SimulatedEpisode
from dreamgym_lg.simulate.guard.checks import Allow
from dreamgym_lg.simulate.guard.guard import Blocked, RealAccessBlocked
from dreamgym_lg.simulate.route import Route

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
