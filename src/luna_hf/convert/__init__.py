"""The command `python -m luna_hf convert`: any trained encoder becomes a linear-time one, with a report."""
