"""The machine that learns: engines, trainers, algorithms, environments, the daemon and the command line."""
