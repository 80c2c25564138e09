"""ALFWorld (Shridhar et al., 2021). `text` and `data` are pure Python and need neither alfworld nor its engine."""
