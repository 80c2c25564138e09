"""The curriculum: which tasks are trained on next (paper, section 4)."""
