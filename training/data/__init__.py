"""From documents to rows: sources, the store of tokens, masking, order."""
