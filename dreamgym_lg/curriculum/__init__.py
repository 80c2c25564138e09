"""The curriculum: chooses the next tasks to train on (paper, section 4)."""
