"""Training methods on one model, one frozen base and the same rows, compared at equal quality."""
