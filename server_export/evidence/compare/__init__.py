"""Compare training methods on one model, one frozen base and the same rows, at equal quality."""
