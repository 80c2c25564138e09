"""Measures how far a dream can be trusted, and reports it."""

from dreamgym_lg.fidelity.report import Fidelity, measure, write_fidelity

__all__ = ["Fidelity", "measure", "write_fidelity"]
