"""Running updates: loop, checkpoints, progress, results."""
