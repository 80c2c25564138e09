"""A trained policy in production: beside the old one (`shadow`), for a share of the traffic (`canary`), and their log."""

from dreamgym_lg.production.canary import canary, shadow, wait_for_shadows
from dreamgym_lg.production.log import CanaryLog, CanaryState, Pair, Served
from dreamgym_lg.production.traffic_router import KillSwitch, SimulationOptions

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
