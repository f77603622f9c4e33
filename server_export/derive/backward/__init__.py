"""Backpropagation as an inference graph: forward, loss and backward of a program in one."""
