"""Converts texts and messages to token ids."""
