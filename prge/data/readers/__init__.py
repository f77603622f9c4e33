"""Reads rows, each a number and fields, from files."""
