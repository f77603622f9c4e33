"""Verification of exports: programs against graphs, blocks against the model; and cost estimates."""
