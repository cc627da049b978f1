"""The pretraining engine: its loop, checkpoints, speed, and what a run leaves."""
