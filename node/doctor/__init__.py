"""`shoal doctor`: what of this machine, home and network keeps a node from working, and what to do about it."""
