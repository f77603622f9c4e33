"""Rows to segments: a file for what each form of rows reads."""
