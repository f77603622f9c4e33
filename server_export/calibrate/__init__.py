"""Calibrated rounding of int4 layers: rows, layers that stay int8, and codes that compensate errors."""
