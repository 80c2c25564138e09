"""A trained policy in production: beside the old one (`shadow`), for a share of the traffic (`canary`), and their log."""

from dreamgym_lg.production.canary import canary, shadow, wait_for_shadows
from dreamgym_lg.production.front import KillSwitch, SimulationOptions
from dreamgym_lg.production.log import CanaryLog, CanaryState, Pair, Served

__all__ = [
    "CanaryLog",
    "CanaryState",
    "KillSwitch",
    "Pair",
    "Served",
    "SimulationOptions",
    "canary",
    "shadow",
    "wait_for_shadows",
]
