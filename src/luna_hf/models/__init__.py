"""Encoder, decoder and encoder-decoder, complete but for the attention, which each family adds."""
