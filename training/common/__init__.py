"""What every training command uses."""
