"""The layers of all models: modules that hold parameters and call the operations."""
