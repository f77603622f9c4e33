"""Converts rows to segments, with one file for each form of rows."""
