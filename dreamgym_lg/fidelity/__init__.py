"""How far a dream can be trusted: its answers against real steps, its verdicts on a policy, and the report of both."""

from dreamgym_lg.fidelity.measure import ameasure, measure
from dreamgym_lg.fidelity.page import write_fidelity
from dreamgym_lg.fidelity.records import Fidelity

__all__ = ["Fidelity", "ameasure", "measure", "write_fidelity"]
