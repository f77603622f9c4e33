"""Backpropagation as an inference graph: forward and backward pass of a block in one graph."""
