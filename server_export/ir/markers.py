"""Symbolic sizes: the integers that a graph is traced with to mark an axis wherever it appears in a shape.

They are large primes: no known model has a width, vocabulary or number of heads that is a multiple of one.
"""

from __future__ import annotations

BATCH, TOKENS, COPIES = 7919, 6007, 5003
# Number of directions of a forward-mode derivative; number of tokens before those of a call.
QUERIES, PAST = 4007, 3001
