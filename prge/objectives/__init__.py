"""Losses as functions of scores: examples, their scores by an engine, and the objectives of preferences."""
