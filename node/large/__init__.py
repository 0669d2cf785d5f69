"""A large node: one whose trainer, engines and scorers run where Ray puts them, on one machine or on several."""
