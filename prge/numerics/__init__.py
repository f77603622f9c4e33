"""Computations between a model's programs, in float32 and in one order: vocabulary shards and experts."""
