"""Quantization of frozen weights: linear layers, embedding tables, and the quantized layers of a bundle."""
