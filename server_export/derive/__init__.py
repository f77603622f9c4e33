"""Derive a block in every role: forward, JVP and backward passes as inference graphs."""
