"""Passes over exported graphs, without ExecuTorch."""
