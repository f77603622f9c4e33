"""The files of a model: configuration, weights, tokenizer, chat template."""
