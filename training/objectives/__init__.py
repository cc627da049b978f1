"""What a pretraining run minimises."""
