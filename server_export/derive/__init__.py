"""Graphs that answer derivatives: tangents and backpropagation."""
