"""A swarm with coordinators: who signs rounds, and how every node follows, verifies and obeys them."""
