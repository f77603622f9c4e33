"""What the method is compared with: trainings of the same model on the same rows, in PyTorch.

Rows, tasks and tokenizers are read, and rows scored, as a run on a device does it: a comparison is fair only
if both see the same tokens, cut alike, in the same order.
"""
