"""From rows of a file to examples, and from scored examples to metrics: the same on every side."""
