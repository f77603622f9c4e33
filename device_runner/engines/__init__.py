"""Engines that run a bundle's programs, and what decides between them."""
