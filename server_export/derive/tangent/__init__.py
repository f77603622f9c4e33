"""Forward-mode differentiation of an exported graph: a program that carries exact derivatives of its rows."""
