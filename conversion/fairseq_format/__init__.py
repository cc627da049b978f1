"""The checkpoints of Luna's authors (fairseq): files, names, arguments, tokenizer, and a reference to compare with."""
