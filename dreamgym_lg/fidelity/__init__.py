"""How far a dream can be trusted: its answers against real steps, its verdicts on a policy, and the report of both."""

from dreamgym_lg.fidelity.measure import Fidelity, ameasure, measure
from dreamgym_lg.fidelity.page import write_fidelity
from dreamgym_lg.fidelity.verdicts import Verdicts, judge, summarise

__all__ = ["Fidelity", "Verdicts", "ameasure", "judge", "measure", "summarise", "write_fidelity"]
