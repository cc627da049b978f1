"""ABC (Peng et al. 2022)."""
