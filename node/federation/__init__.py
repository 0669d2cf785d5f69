"""Policies of a large node for others with the same base model: weights out, groups in."""
