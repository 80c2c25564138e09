"""The curriculum: which tasks are trained on next (paper, section 4)."""

from dreamgym_lg.curriculum.curriculum import Curriculum

__all__ = ["Curriculum"]
