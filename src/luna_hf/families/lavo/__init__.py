"""LAVO."""
