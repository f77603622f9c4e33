"""Computations between a model's programs, in float32 and in a fixed order: vocabulary shards and experts."""
