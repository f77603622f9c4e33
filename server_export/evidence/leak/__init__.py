"""Attacks on the reports of a fleet's device, which try to reconstruct its rows."""
