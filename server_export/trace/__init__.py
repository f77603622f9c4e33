"""Tracing: a model without weights is traced, rewritten and cut into blocks."""
