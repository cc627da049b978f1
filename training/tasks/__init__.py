"""Finetuning on the Trainer: tasks, runs, sweeps and reports."""
