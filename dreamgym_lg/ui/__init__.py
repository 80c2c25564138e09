"""`dreamgym ui`: a local page over a replay buffer, which it only reads."""
