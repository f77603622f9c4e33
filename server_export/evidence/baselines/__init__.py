"""Baselines: other methods that train the same model on the same rows, in PyTorch.

Rows, tasks and tokenizers are read and rows are scored by the code of a run on a device. A comparison is fair
only if both sides see the same tokens, truncated in the same way and in the same order.
"""
