"""A trained policy in production, for some threads."""

from dreamgym_lg.production.canary import canary
from dreamgym_lg.production.log import CanaryLog, CanaryState, Served

__all__ = ["CanaryLog", "CanaryState", "Served", "canary"]
