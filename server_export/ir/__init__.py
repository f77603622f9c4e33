"""Graphs of a model and what is written into them: shapes, constants, operators."""
