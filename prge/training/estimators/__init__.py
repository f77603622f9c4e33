"""Estimators of a step's gradient: finite differences, tangents along random directions, or exactly."""
