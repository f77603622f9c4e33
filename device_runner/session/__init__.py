"""A run on a device: its settings, its inputs, its sensors and constraints, and its memory."""
