"""Files to rows: a number and fields."""
