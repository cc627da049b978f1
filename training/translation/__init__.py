"""Translation: parallel text, batches by tokens, the run, and BLEU and chrF of the finished model."""
