"""GEPA, the prompt learner: it needs the extra `gepa`."""
