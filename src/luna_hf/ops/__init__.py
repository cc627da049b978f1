"""Operations on tensors: pure functions, and the tuples that they exchange."""
