"""Lowering of graphs to ExecuTorch programs and weights files."""
