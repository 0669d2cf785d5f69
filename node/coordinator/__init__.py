"""`shoal coordinator up`: a process that signs rounds, evaluates members and lets them in. It has no model."""
