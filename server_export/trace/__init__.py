"""A model without weights becomes blocks: traced, rewritten and cut."""
