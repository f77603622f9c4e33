"""Forward-mode differentiation of a block's graph: a program that carries exact derivatives of its rows."""
