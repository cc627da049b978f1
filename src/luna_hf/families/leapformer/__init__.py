"""LeaPformer (Agostinelli et al. 2024), cosFormer and linear attention."""
