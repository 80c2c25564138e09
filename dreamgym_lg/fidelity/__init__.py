"""How far a dream can be trusted: its answers against real steps, its verdicts on recorded episodes, and the report of both."""

from dreamgym_lg.fidelity.measure import measure
from dreamgym_lg.fidelity.report import Fidelity, write_fidelity

__all__ = ["Fidelity", "measure", "write_fidelity"]
