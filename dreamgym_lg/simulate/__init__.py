"""Unmodified LangGraph agents in the dream: their models answered by the policy, their tools by an environment."""

from dreamgym_lg.simulate.agent import SimulatedAgent, simulated, with_policy
from dreamgym_lg.simulate.doctor import examine
from dreamgym_lg.simulate.episode import Call, Episode
from dreamgym_lg.simulate.guard.guard import Allow, Blocked, RealAccessBlocked

__all__ = ["Allow", "Blocked", "Call", "Episode", "RealAccessBlocked", "SimulatedAgent", "examine", "simulated", "with_policy"]
