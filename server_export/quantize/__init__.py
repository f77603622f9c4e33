"""Rounding of frozen weights: layers, tables of embeddings, and what a bundle holds of them."""
