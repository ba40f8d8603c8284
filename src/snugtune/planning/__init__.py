"""What is decided before a run, with reasons."""
