"""Measures how far a dream can be trusted, and reports it."""

from dreamgym_lg.fidelity.measure import measure
from dreamgym_lg.fidelity.report import Fidelity, write_fidelity

__all__ = ["Fidelity", "measure", "write_fidelity"]
