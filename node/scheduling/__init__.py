"""What the scheduler decides by: lengths to expect, and which of the begun groups make up a step."""
