"""Engines that run a bundle's programs, and the planning of their calls."""
