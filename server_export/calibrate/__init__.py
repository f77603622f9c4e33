"""Calibration of int4 layers: rows, the choice of int8 layers, and codes that compensate errors."""
