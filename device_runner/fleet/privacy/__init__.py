"""Differential privacy of a device: its noise, the resulting epsilon, and the ledger of past rounds."""
