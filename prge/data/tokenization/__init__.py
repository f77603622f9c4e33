"""Texts and messages to token ids."""
