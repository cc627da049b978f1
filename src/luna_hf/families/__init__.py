"""The families: a configuration, an attention and the names of the models each."""
