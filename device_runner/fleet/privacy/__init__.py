"""Differential privacy of a device: noise, what it amounts to, and what was given away so far."""
