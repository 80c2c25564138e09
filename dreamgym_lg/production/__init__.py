"""A trained policy in production, beside the old one or for some threads."""

from dreamgym_lg.production.canary import canary
from dreamgym_lg.production.log import CanaryLog, CanaryState, Pair, Served
from dreamgym_lg.production.shadow import shadow, wait_for_shadows

__all__ = ["CanaryLog", "CanaryState", "Pair", "Served", "canary", "shadow", "wait_for_shadows"]
