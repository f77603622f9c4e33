"""Forward-mode differentiation of a block's graph."""
