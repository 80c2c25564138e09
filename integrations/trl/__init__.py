"""Supervised training and the learners, on TRL."""

from importlib.util import find_spec

from dreamgym_lg.errors import MissingDependency

for _name in ("peft", "torch", "transformers", "trl"):
    if find_spec(_name) is None:
        raise MissingDependency.extra(_name, "train")
