"""Luna (Ma et al. 2021)."""
