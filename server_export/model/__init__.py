"""A model as a chain of blocks, and rows on their way through it."""
