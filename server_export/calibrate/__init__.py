"""Calibration of int4 layers: its rows, the choice of layers that stay int8, and codes that compensate
errors."""
