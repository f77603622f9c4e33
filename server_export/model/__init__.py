"""A model as a chain of blocks, and sequences that are computed block by block."""
