"""What `convert.py` runs: rows of all lengths, a teacher's targets, the loss, and the evaluation by length."""
