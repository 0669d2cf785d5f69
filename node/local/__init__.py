"""`shoal local`: a whole swarm on one machine."""
