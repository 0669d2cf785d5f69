"""How experience travels, is admitted, stored and chosen. Knows nothing of a model."""
