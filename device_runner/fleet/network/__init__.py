"""Fleets over a network, through Flower."""
