"""Sizes that a graph is traced with, which mark what they are wherever they show in a shape.

They are large primes: no width, vocabulary or number of heads is known to have one of them as a factor.
"""

from __future__ import annotations

BATCH, TOKENS, COPIES = 7919, 6007, 5003
# Directions of a forward-mode derivative, and tokens before those of a call.
QUERIES, PAST = 4007, 3001
