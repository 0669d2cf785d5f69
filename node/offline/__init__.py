"""Learning from what is known already, without rollouts: preferences, labels and gold answers, by TRL's trainers."""
