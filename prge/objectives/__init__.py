"""Examples, their scores computed with an engine, and losses as functions of scores."""
