"""What the method is compared with: trainings of the same model on the same rows, in PyTorch.

These modules read rows, tasks and tokenizers with `device_runner`, as a run on a device does: a comparison is
fair only if both see the same tokens, cut alike, in the same order, and are scored alike.
"""
