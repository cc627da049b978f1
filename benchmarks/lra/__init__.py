"""Long Range Arena (Tay et al. 2020, arXiv 2011.04006): five tasks on sequences of 1,000 to 4,000 tokens."""
