"""The toy mechanism."""
