"""Ways to need less memory: one file each."""
